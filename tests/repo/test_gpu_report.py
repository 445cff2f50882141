"""What the report of bench/gpu.py makes of its measurements: targets and predictions."""

import pytest
import torch


def test_the_results_of_a_run_are_kept(bench, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    results, journal = bench("gpu_results"), bench("gpu_journal").Journal(tmp_path)
    journal.append(
        machine={"date": "2026-11-23", "name,clocks.sm": "NVIDIA H100 80GB HBM3, 345 MHz"},
        command="python bench/gpu.py",
    )
    case = {"op": "gae", "work": "GAE", "shape": "1 x 1", "dtype": "float32", "label": "gae 1 x 1"}
    case |= {"flops": 0, "bytes_moved": 1, "small": False, "density": 1.0}
    times = {
        "fastrl triton": ("fastrl triton", 2.0),
        "fastrl cuda": ("fastrl cuda", 1.0),
        "fastrl cuda in place": ("fastrl cuda in place", 0.5),
        "fastrl cuda, half": ("scaled", 0.1),
        "copy": ("floor", 0.1),
        "torchrl": ("peer", 3.0),
        "broken": ("peer", None),
    }
    rows = [
        {"provider": name, "kind": kind, "samples": [] if took is None else [took], "peak": 0}
        | {"failure": "" if took else "not installed", "error": 0.0, "host": None}
        for name, (kind, took) in times.items()
    ]
    journal.append(job="0", result={**case, "providers": rows})
    found = results.relative_times(journal.entries())
    relative = {"fastrl triton": 2.0, "fastrl cuda": 1.0, "torchrl": 3.0}
    assert found == {"gae": {"1 x 1 float32, GAE": relative}}
    arguments = ["--out", str(tmp_path), "--results", str(tmp_path / "kept")]
    monkeypatch.setattr("sys.argv", ["gpu_results.py", *arguments])
    results.main()
    names = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert names == [f"h100-80gb-hbm3-2026-11-23.{kind}" for kind in ("jsonl", "md", "png")]
    assert "| torchrl | 3 (3-3) |" in (tmp_path / "kept" / names[1]).read_text()
    monkeypatch.setattr("sys.argv", ["gpu_results.py", "--out", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit):
        results.main()
    assert "bench.jsonl has no results" in capsys.readouterr().err


AUTOCAST = ", float32 weights, autocast"


def test_targets_are_ratios_of_one_run(bench):
    report = bench("gpu_report")

    def job(work, shape, dtype, **times):
        providers = [
            {
                "provider": name.replace("_", " ").replace(" autocast", AUTOCAST),
                "samples": [t - 0.1, t, t + 1],
                "kind": name.split("_")[0],
            }
            for name, t in times.items()
        ]
        return {"result": {"work": work, "shape": shape, "dtype": dtype, "providers": providers}}

    # a copy reads and writes: at its speed, reading alone takes half its time
    results = {
        "0": job("log-probability and entropy", "8192 x 151936", "bfloat16",
                 fastrl_triton=1.0, fastrl_cuda=1.25, copy=2.0),
        "1": job("loss and gradient", "8192 x 151936", "bfloat16", fastrl_triton=2.5, copy=2.0),
        "2": job("loss and gradients, trained head", "8192 x 4096 x 128256", "bfloat16",
                 fastrl_triton=46.0, fastrl_triton_autocast=48.0, bare_GEMMs=40.0,
                 peer_slow=60.0, peer_fast=45.0),
        "3": job("GAE with a mask", "16 x 131072", "float32", fastrl_cuda=1.0),
        "graph 3 fastrl cuda": {"result": {"milliseconds": 0.018}},
    }  # fmt: skip
    rows = [line.split(" | ")[1:] for line in report.targets(results)[4:]]
    assert rows == [
        ["triton", "100.0 %", "met 85, 90, 92 |"],
        ["cuda", "80.0 %", "missed 85, 90, 92 |"],
        ["triton", "80.0 %", "met 80; missed 88, 92 |"],
        ["triton", "0.978 (peer fast)", "missed 1 |"],
        ["| not run", "|"],
        ["triton", "1.150", "met 1.15 |"],
        ["| not run", "|"],
        ["triton", "1.043", "met 1.05 |"],
        ["cuda", "18.0 us", "met 60, 20; missed 15 |"],
    ]


H100 = {"copy TB/s": 3.0, "multiprocessors": 132, "cache MB": 52.4}


def entry(item):
    """What a run keeps of a case."""
    case = item.make()
    kept = {name: getattr(case, name) for name in ("op", "work", "shape", "bytes_moved")}
    return {**kept, "dtype": str(case.dtype).removeprefix("torch."), "density": item.density}


def test_predictions_are_of_the_constants_that_kernels_are_launched_with(bench):
    pytest.importorskip("triton")
    from fastrl.triton.gae import gae
    from fastrl.triton.vocabulary import rows

    predictions = bench("gpu_predictions")
    assert (predictions.RESIDENT, predictions.GAE_CHUNK) == (rows.RESIDENT, gae.BLOCK)


@pytest.mark.parametrize(
    ("provider", "work", "density", "moved"),  # bytes per logit, of two
    [
        ("fastrl triton", "log-probability and entropy", 1.0, 2),
        ("fastrl cuda", "log-probability and entropy", 0.5, 1),
        ("fastrl triton", "log-probability and entropy, with backward", 1.0, 6),
        ("fastrl cuda", "loss and gradient", 1.0, 4),
        ("fastrl cuda", "loss and gradient", 0.5, 3),
        ("fastrl cuda, half the loss", "loss and gradient", 1.0, 8),
        # 264 rows of 303,872 bytes are in flight, 80.2 MB, of which the cache holds 52.4
        ("fastrl triton", "loss and gradient", 1.0, 4 + 2 * (1 - 52.4 / 80.222208)),
    ],
)
def test_a_prediction_is_the_bytes_over_the_copy_rate(bench, provider, work, density, moved):
    logits = bench("gpu_logits")
    shape = logits.Logits(8192, 151936, density=density)
    case = entry(logits.logits_item(torch.device("cpu"), shape, work))
    found = bench("gpu_predictions").seconds(case, provider, H100)
    # and a few launches of 3 us
    assert 0 <= found - 8192 * 151936 * moved / 3e12 <= 25e-6


@pytest.mark.parametrize(
    ("kind", "of", "provider", "microseconds"),
    [
        ("gae_item", (16, 131072), "fastrl cuda", 17 * 2**21 / 3e6 + 6),
        ("gae_item", (16, 131072), "fastrl triton", 17 * 2**21 / 3e6 + 6),
        # 9 of the 26 bytes of so many tokens do not fit into the cache
        ("gae_item", (1, 2**28), "fastrl triton", (26 * 2**28 - 52.4e6) / 3e6 + 6),
        ("tokens_item", (16, 4096, "token"), "", 14 * 2**16 / 3e6 + 18),
        # 16 of 132 multiprocessors, each with at most twice its share of the copy rate
        ("tokens_item", (16, 4096, "sequence"), "", 32 * 2**16 / (3e6 * 32 / 132) + 18),
        ("groups_item", (128, 8, True), "", 25 * 1024 / 3e6 + 3),
    ],
)
def test_a_prediction_on_tokens(bench, kind, of, provider, microseconds):
    case = entry(getattr(bench("gpu_tokens"), kind)(torch.device("cpu"), *of))
    assert 1e6 * bench("gpu_predictions").seconds(case, provider, H100) == pytest.approx(
        microseconds
    )


def test_a_prediction_of_a_linear_form_has_the_rates_of_the_machine(bench):
    predictions, linear = bench("gpu_predictions"), bench("linear_prediction")
    N, H, V = 8192, 4096, 128256

    def case(**options):
        linear_case = bench("gpu_linear")
        shape = linear_case.Linear(N, H, V, **options)
        return entry(linear_case.linear_item(torch.device("cpu"), shape))

    chunk = linear.chunk_rows(H, V)
    found = predictions.seconds(case(), "fastrl cuda", H100)
    assert found == pytest.approx(linear.predicted(N, H, V, chunk, 6))
    half = predictions.seconds(case(density=0.5), "fastrl cuda", H100)
    assert half == pytest.approx(linear.predicted(N // 2, H, V, chunk, 6))
    frozen = predictions.seconds(case(trained=False), "", H100)
    assert frozen == pytest.approx(linear.predicted(N, H, V, chunk, 6, trained=False))
    assert frozen < found < 6 * N * H * V / 500e12
    slower = {**H100, f"{N} x {V} x {H} bf16 TFLOP/s": 350.0, "1 x 1 x 1 bf16 TFLOP/s": 700.0}
    assert predictions.seconds(case(), "fastrl cuda", slower) > 1.8 * found


def test_a_measurement_apart_from_its_prediction_is_marked(bench):
    row = {"kind": "fastrl cuda", "failure": ""}
    took = 8192 * 151936 * 2 / 3e9  # milliseconds
    providers = [
        {**row, "provider": "fastrl cuda", "samples": [1.1 * took]},
        {**row, "provider": "fastrl triton", "samples": [1.3 * took]},
        {**row, "provider": "eager", "samples": [9 * took]},
    ]
    case = {"op": "token_stats", "work": "log-probability and entropy", "dtype": "bfloat16"}
    case |= {"label": "a case", "shape": "8192 x 151936", "small": False}
    case |= {"bytes_moved": 8192 * 151936 * 2}
    results = {
        "anchors": {"result": H100},
        "0": {"result": {**case, "providers": providers}},
    }
    cuda, triton = bench("gpu_predictions").predictions(results)[-2:]
    assert cuda.endswith("| 1.10 |  |")
    assert triton.endswith("| 1.30 | apart |")
    assert "No copy rate" in bench("gpu_predictions").predictions({})[-1]
