#!/usr/bin/env python3
"""Does the server tokenize as the reference tokenizers do? Oracles: HF `tokenizers` (tokenizer.json) and `tiktoken` (an Encoding built offline
from vocab.json with GPT-2's split pattern; tiktoken.get_encoding("gpt2") would download and fails without network).

The server's view is taken from POST /tokenize {"prompt": ...} (vLLM form) and {"inputs": ...} (TGI form), POST /detokenize, and from echo.

usage: accept_tokenizer.py BASE_URL    env: TOKENIZER_DIR, MODEL, EXAMPLES (default 300)
needs: tokenizers tiktoken hypothesis
"""

import json
import os

import tiktoken
from _check import Checks, base_url, http, model_name, tokenizer_dir
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

BASE, DIR = base_url(), tokenizer_dir()
MODEL = model_name(BASE)
c = Checks(f"tokenization of {BASE} against {DIR}")
hf = Tokenizer.from_file(f"{DIR}/tokenizer.json")
EOT = "<|endoftext|>"


def byte_of():
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    m = {chr(b): b for b in keep}
    m.update({chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in keep)})
    return m


B = byte_of()
with open(f"{DIR}/vocab.json") as file:
    vocab = json.load(file)
eot = vocab.pop(EOT)
PAT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
tt = tiktoken.Encoding(
    "own",
    pat_str=PAT,
    mergeable_ranks={bytes(B[ch] for ch in k): v for k, v in vocab.items()},
    special_tokens={EOT: eot},
)


def server(text):
    s, _, x = http("POST", BASE + "/tokenize", {"prompt": text, "add_special_tokens": False})
    assert s == 200, (s, x[:200])
    return json.loads(x)["tokens"]


FIXED = [
    "",
    " ",
    "  ",
    "\n",
    "\t\t",
    "Hello world",
    " Hello",
    "it's we'll they've I'm you'd",
    "1234567890 3.14",
    "a" * 300,
    "naïve café",
    "漢字かな交じり文",
    "🙂🙃👩‍👩‍👧",
    "\u200b\ufeff",
    "x\r\ny",
    "!!!???...",
    "  leading",
    "trailing  ",
    "tab\tand\nnewline\n\n",
    EOT,
    f"a{EOT}b",
    f"{EOT}{EOT}",
    "<|endoftext",
    "\x00\x01",
    "ﷺ",
    "e\u0301",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "\\n \\\" '",
]
with c.step("fixed strings"):
    for t in FIXED:
        a, b, s = hf.encode(t).ids, tt.encode(t, allowed_special="all"), server(t)
        c.ok(f"{t[:24]!r}: tokenizers == tiktoken == server", a == b == s, (a[:20], b[:20], s[:20]))
with c.step("random strings"):
    bad = []

    @seed(1)
    @settings(
        max_examples=int(os.environ.get("EXAMPLES", "300")),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)
        | st.text(alphabet=" \n\t'abcdeséàñ0123456789.,!<|>", max_size=80)
    )
    def run(t):
        s = server(t)
        if not (s == hf.encode(t).ids == tt.encode(t, allowed_special="all")):
            bad.append((t, s, hf.encode(t).ids, tt.encode(t, allowed_special="all")))
            return
        if s:
            code, _, x = http("POST", BASE + "/detokenize", {"tokens": s})
            if code != 200 or json.loads(x)["prompt"] != t:
                bad.append((t, "detokenize", x[:200]))

    run()
    c.ok("random strings: tokenizers == tiktoken == server, and /detokenize gives the string back", not bad, bad[:2])
with c.step("TGI form"):
    t = "Hello café world"
    s, _, x = http("POST", BASE + "/tokenize", {"inputs": t})
    if s == 200 and isinstance(json.loads(x), list):
        c.ok(
            "TGI form: same ids, offsets cut the text",
            [i["id"] for i in json.loads(x)] == hf.encode(t).ids
            and all(0 <= i["start"] <= i["stop"] <= len(t) for i in json.loads(x)),
            x[:300],
        )
    else:
        c.skip("TGI form of /tokenize", s)
with c.step("echo"):
    for t in ("Hello world, it's 3.14", f"a{EOT}b", "漢字🙂"):
        s, _, x = http(
            "POST",
            BASE + "/v1/completions",
            {"model": MODEL, "prompt": t, "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0},
        )
        o = json.loads(x)
        c.ok(
            f"{t!r}: usage.prompt_tokens equals the reference count",
            s == 200 and o["usage"]["prompt_tokens"] == len(hf.encode(t).ids),
            (s, x[:200], len(hf.encode(t).ids)),
        )
c.done()
