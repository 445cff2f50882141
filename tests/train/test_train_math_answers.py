r"""The reward math_verify: how answers are read, compared in time, and checked before a run."""

import threading

import pytest

pytest.importorskip("transformers")
pytest.importorskip("math_verify")

from fastrl.train.math_answers import in_worker, math_equality
from fastrl.train.rewards import RewardError
from tests.train.runs import asked, rewards_of

GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72"
TOWER = r"\boxed{9^{9^{9^9}}}"


def judged(answer, *completions):
    count = len(completions)
    return in_worker([""] * count, list(completions), [{"answer": answer}] * count)


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (r"3\sqrt{13}", r"\sqrt{117}", "3"),
        (r"$3\sqrt{13}$", r"3\sqrt{13}", "3"),
        (r"The side is \boxed{3\sqrt{13}}.", r"3\sqrt{13}", "3"),
        (r"#### 3\sqrt{13}", r"3\sqrt{13}", "3"),
        ("6 - 5i", "-5i + 6", "5"),
        ("2k+2", "2(k+1)", "2"),
        ("$y=3 x+2$", "3x + 2", "2"),
        (r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}", r"1+\sqrt{19}"),
        (r"$\$ 1,540$", "1540", "1"),
        (r"10 \text{ cm}", "10", "11"),
        (42, "42.0", "4"),
        (0.5, r"\frac{1}{2}", "5"),
        (1e-7, "10^{-7}", "1"),
        ("B", r"\text{(B)}", "C"),
        ("(E)", "E", "A"),
        ("1,3,5", "5, 3, 1", "5"),
        ("$(1,2)$ and $(3,4)$", "(3,4), (1,2)", "(3,4)"),
        (r"\{1,2\}", r"\{2,1\}", r"\{1\}"),
        ("[-2,7]", r"\left[-2,7\right]", "(-2,7)"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \frac{\pi}{2})", "3"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}", "2"),
        (r"\text{Evelyn}", "Evelyn", r"\text{Evlyn}"),
        ("Evelyn", r"\text{Evelyn}", "Evylen"),
        (r"\text{June 20}", r"\text{June 20}", "20"),
    ],
)
def test_an_answer_is_read_as_a_whole(answer, right, wrong):
    assert judged(answer, rf"So \boxed{{{right}}}.", rf"So \boxed{{{wrong}}}.") == [1, 0]
    if isinstance(answer, str) and "####" not in answer and "boxed" not in answer:
        assert judged(answer, rf"\boxed{{{answer}}}", f" {answer}\n") == [1, 1]


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (7, ["The answer is 7", "She has 7 apples", "Answer 7", "**Answer:** 7", "$7/hour"], []),
        (7, ["The answer is $7$.", r"It is \(7\)", "7 km/h", "7<|im_end|>"], ["7 or 8", "not 7"]),
        (
            7,
            ["The answer is 7\n3"],
            ["7 and 8 and 9", "72 or 7", "7 hundred", "7 and a half", "7 xy"],
        ),
        (
            72,
            ["72 m\u00b2", "72 \u00b0C", "(72)", '"72"', "US$72", "Rs. 72", "~72", "+72"],
            ["72!"],
        ),
        (
            5,
            [],
            ["x + 5", "x > 5", "5\u00b2", "\u221a5", "5\u03c0", "5\u00bd", "5^x", "5!", "(5, 5)"],
        ),
        (-3, ["(-3)", "(\u22123)", "negative 3", "The answer is -3"], ["(3)", "x - 3"]),
        ("#### The answer is 7", ["7"], ["8"]),
        ("#### x + 5", ["5 + x"], ["5"]),
        ("1, 3", ["3, 1", "1 and 3"], ["1", "1 or 3"]),
        (r"\frac{\sqrt{3}}{2}", [r"The answer is $\frac{\sqrt{3}}{2}$", "\u221a3/2"], ["3/2"]),
    ],
)
def test_words_around_a_number_are_ignored_and_formulas_are_read_whole(answer, right, wrong):
    texts = [f"1 + 1\n#### {text}" for text in right + wrong]
    assert judged(answer, *texts) == [1] * len(right) + [0] * len(wrong)


WHOLE = ["x^2 + 1", "3:2", "2 1/2", "10:30", "\u03c0/2", "{1,2,3}", "1 and 2", "1, 2", "[0, 5)"]
WHOLE += ["12 34", "5'6\"", "2023-01-01", "10/12/2023", "007", "5 feet 6 inches", "Jos\u00e9"]
WHOLE += ["June 5", "5 or 7", "2 and a half", "3.5 million", "5 mod 7", "5x", "$n$ is odd"]
WHOLE += ["sin 5", "5 out of 7", "5-6i"]


@pytest.mark.parametrize("answer", WHOLE)
def test_an_answer_equals_its_own_text_and_no_number_in_it(answer):
    right = [f"#### {answer}", f"#### **{answer}**.", rf"\boxed{{{answer}}}", answer]
    assert judged(answer, *right, "#### 5", r"\boxed{5}", r"\boxed{7}") == [1] * 4 + [0] * 3


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("2 1/2", ["2.5", "2\u00bd", r"2\frac{1}{2}"], ["1.5"]),
        ("5 3/4", [r"\frac{23}{4}"], ["2"]),
        ("-5\u00be", ["-5.75", "-5 3/4"], ["-4.25", "5.75"]),
        ("1 000", ["1000", r"1\,000", "1{,}000", "1,000"], ["0", "1"]),
        ("100\u202f000", ["100000"], ["100"]),
        ("\u00bd", [r"\frac12"], ["2"]),
        ("5\u00b2", ["25"], ["5", "52"]),
        ("\u221a13", [r"\sqrt{13}"], ["13"]),
        ("\u20ac5", ["5"], ["6"]),
        ("5\u20ac", ["5"], ["6"]),
        ("\u00a33.50", ["3.5"], ["3"]),
        ("10^-3", ["0.001", "10^{-3}"], ["7"]),
        ("1e-5", ["10^{-5}", "0.00001"], ["-5"]),
        ("12 34", [], ["46", "408", "1234"]),
        ("5'6\"", [], ["56"]),
        ("2023-01-01", [], ["2021"]),
        ("90\u00b0", ["90", r"90^\circ"], ["9"]),
        ("pi/2", [r"\frac{\pi}{2}"], ["2"]),
        ("$5 xy$", ["5xy"], ["5"]),
    ],
)
def test_forms_of_numbers(answer, right, wrong):
    texts = [rf"\boxed{{{text}}}" for text in right + wrong]
    assert judged(answer, *texts) == [1] * len(right) + [0] * len(wrong)


def test_a_number_with_words_is_a_number():
    for unit in ("dollars", "clips", "people", "years old", "USD", "oz", "km"):
        right = [r"\boxed{18}", "#### 18", "The answer is 18.", f"#### 18 {unit}"]
        assert judged(f"18 {unit}", *right, r"\boxed{81}") == [1] * 4 + [0]
    assert judged("2.5", "The answer is 2 1/2.", "#### 2 1/2 cups", r"\boxed{1.5}") == [1, 1, 0]
    assert judged("-3", "(-3)", "The answer is (-3).", "It is \u22123.", "(-3)^2") == [1, 1, 1, 0]


def test_the_box_of_the_last_sentence_counts():
    thought = (
        "<think>\nLet me see: \\boxed{38}? No, one more.\n</think>\n\nThe answer is \\boxed{39}"
    )
    texts = [thought, "1: \\boxed{3}\n2: \\boxed{39}", "\\boxed{3}</think>\\boxed{39}"]
    assert judged("39", *texts, r"It is $\boxed{3}$. No: \boxed{39}") == [1] * 4
    assert judged("39", r"\boxed{3} \boxed{39}", r"\boxed{39}, or \boxed{3}") == [0] * 2


def test_the_number_after_the_last_hashes_is_an_answer_and_several_are_not():
    texts = ["72", "\n72", "72\nThat is 3 clips per friend.", "72.0", "$72", "$72$", "**72**"]
    texts += ["72 m^2", "72 m2", "8 x 9 = 72", "$8 x 9 = $72", "71 2/2", "72.", r"\$72", r"\(72\)"]
    texts += ["48 + 24 = 72", "144/2", r"\frac{144}{2}"]
    assert judged(GSM8K, *(f"2 + 3\n#### {text}" for text in texts)) == [1] * len(texts)
    texts = ["70 or 72", "72 or 70", "72\n#### 5", "7, 72", "", "72 - 70", "-72", "7 2"]
    texts += ["\u221272", "\u2013 72", "- 72", "-$72", "minus 72", "72 million", "72k", "72x"]
    assert judged(GSM8K, *(f"2 + 70\n#### {text}" for text in texts)) == [0] * len(texts)
    negative = ["-3", "\u22123", "\u2013 3", "- 3", "-$3", "$-3", "minus 3", "-3 degrees", "1 - 4"]
    assert judged("#### -3", *(f"#### {text}" for text in negative)) == [1] * len(negative)
    assert judged("-2", "#### -2 m", "#### 2") == [1, 0]
    for answer, right in (("1,234", "1234"), ("-5", "-5"), ("1/2", "0.5"), ("10%", r"10\%")):
        assert judged(f"#### {answer}", f"#### {right}", "#### 5") == [1, 0]


def test_a_list_of_guesses_is_no_answer():
    boxes = [r"\boxed{5} and \boxed{72}", r"\boxed{72}, \boxed{5}", r"\boxed{5, 72}"]
    assert judged(GSM8K, *boxes, "$5$ or $72$") == [0] * 4
    assert judged("72, 5", *boxes) == [1] * 3
    last = [rf"\boxed{{5}}? {'No. ' * 30}\boxed{{72}}", "24 in May, and 48 + 24 = 72.", "is 1 + 71"]
    last += ["The answer is 72. I added 3 and 4.", "The answer is 72, made of 3 and 4."]
    assert judged(GSM8K, *last) == [1] * 5
    assert judged("3,4", *last[-2:]) == [0] * 2


def test_a_heading_hides_no_answer_and_a_later_mark_counts():
    texts = ["\\boxed{72}\n#### Check: 5", "#### Step 1\n\\boxed{72}", "\\boxed{5}\n#### 72"]
    assert judged(GSM8K, *texts, "#### 72\nNo: \\boxed{5}") == [1, 1, 1, 0]
    steps = "#### Step 2: Add\n2+70=72\nThe answer is 72."
    texts = [steps, f"### Solution\n#### Step 1\nadd\n{steps}", "#### Step 1\n2\n#### Answer:\n72"]
    assert judged(GSM8K, *texts, "\\boxed{72}\n#### Done") == [1] * 4
    assert judged("2", *texts) == [0] * 3
    assert judged("#### B", "#### B", "#### C") == [1, 0]


def test_what_takes_long_is_no_answer():
    """In any thread, and in any order."""
    rewards, found = rewards_of("math_verify", reward_timeout=5.0), []
    texts = ["#### 72", TOWER, r"\boxed{71}", r"\boxed{72}"]

    def score(texts):
        scored = rewards.score(asked(*[GSM8K] * 4), texts, [1] * 4)
        found.append((scored.total.tolist(), scored.failed.any().item()))

    thread = threading.Thread(target=score, args=(texts,))
    thread.start()
    thread.join()
    score([texts[2], texts[3], texts[0], texts[0]])
    rewards.close()
    assert found == [([1, 0, 0, 1], False), ([0, 1, 1, 1], False)]
    assert math_equality([""], texts[:1], [{"answer": GSM8K}]) == [1]


def test_every_answer_is_checked_before_a_run():
    """Also if failures have a reward: it is not the completion that fails."""
    rewards = rewards_of("math_verify", reward_failed=0.0)
    for answer in (None, True, ["1"], "", r"\boxed{}", "#### 70 or 72", "N/A", "?", "nan", "*"):
        rewards.probe(asked("p - q", GSM8K, 7, "B"))
        with pytest.raises(RewardError, match=r'^reward math_verify: "answer" must') as error:
            rewards.probe(asked(*["5"] * 19, answer, *["6"] * 20))
        assert f"got {answer!r} for 'question 19'" in str(error.value)
    rewards.close()
