#!/usr/bin/env python3
"""Does the server tokenize as HF's `tokenizers` (tokenizer.json) and `tiktoken` (vocab.json with GPT-2's pattern) do?

usage: accept_tokenizer.py BASE_URL    env: TOKENIZER_DIR
"""

import json
import os

import tiktoken
from _check import begin, http
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

BASE, MODEL, c = begin("tokenization")
DIR = os.environ["TOKENIZER_DIR"]
hf = Tokenizer.from_file(f"{DIR}/tokenizer.json")
EOT = "<|endoftext|>"
keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = {chr(b): b for b in keep} | {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in keep)}
with open(f"{DIR}/vocab.json") as file:
    vocab = json.load(file)
specials = {EOT: vocab.pop(EOT)}
tt = tiktoken.Encoding(
    "own",
    pat_str=r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
    mergeable_ranks={bytes(BYTES[ch] for ch in k): v for k, v in vocab.items()},
    special_tokens=specials,
)


def post(path, **body):
    status, _, text = http("POST", BASE + path, body)
    assert status == 200, (status, text[:200])
    return json.loads(text)


def check(text):
    ids = post("/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    assert ids == hf.encode(text).ids == tt.encode(text, allowed_special="all"), (text, ids)
    assert post("/detokenize", tokens=ids)["prompt"] == text, (text, ids)


FIXED = ["", " ", "\t\t", "it's we'll they've I'm you'd", "1234567890 3.14", "a" * 300, "naïve café", "漢字かな交じり文", "🙂🙃👩‍👩‍👧",
         "\u200b\ufeff", "x\r\ny", "  leading", "trailing  ", EOT, f"a{EOT}b", EOT * 2, EOT[:-2], "\x00\x01", "ﷺ", "e\u0301"]  # fmt: skip
few = settings(max_examples=100, deadline=None, database=None, suppress_health_check=[*HealthCheck])
anything = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)
likely = st.text(alphabet=" \n\t'abcdeséàñ0123456789.,!<|>", max_size=80)
for name, run in (("fixed", lambda: [*map(check, FIXED)]), ("random", seed(1)(few(given(anything | likely)(check))))):
    with c.step(name):
        run()
        c.ok(f"{name} strings: tokenizers == tiktoken == server, and /detokenize gives them back", True)
with c.step("TGI form"):
    t = "Hello café world"
    pieces = post("/tokenize", inputs=t)
    c.ok("same ids", [i["id"] for i in pieces] == hf.encode(t).ids, pieces)
    c.ok("offsets cut the text", all(0 <= i["start"] <= i["stop"] <= len(t) for i in pieces), pieces)
with c.step("usage"):
    t = f"a{EOT}漢字🙂 it's 3.14"
    usage = post("/v1/completions", prompt=t, max_tokens=1)["usage"]
    c.ok("usage.prompt_tokens is the reference's count", usage["prompt_tokens"] == len(hf.encode(t).ids), usage)
c.done()
