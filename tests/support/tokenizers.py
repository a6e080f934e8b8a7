"""Small tokenizers of each kind, trained for tests, and chat templates: folders as transformers saves them, and GGUF metadata."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from models.text import splits
from models.text.tokenizer import Tokenizer as TextTokenizer
from models.text.tokenizer_files import from_folder

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]")
CORPUS = [
    "First Citizen: we're 12 citizens, they'll say; I'D not!  Before we proceed any further,\n\nhear me speak. ",
    "Größe, 東京 and 🙂🙂 cost 3.50 € \t each... مرحبا नमस्ते été e\u0301te\u0301  1234567\r\n",
    "def f(x):\n    return {'a': x ** 2}  # the comment\n\tif x is None:\n\t\tpass\n<div class=\"a\">text</div>",
    "the then there other mother brother is his this history in ing thing nothing user assistant system",
] * 8
SPELLINGS = ["'s", "'LL", "’s", "  ", "\n\n", "\t", "\r\n", "1", "2024", "½", "९", "e\u0301", "é", "東", "🙂", "👩‍👩‍👧", "\u00a0", "ſ", "İ",
             "the", " The", "in", "def f(x):\n    return", "{}", "...", "¿", "ß", "\u200d", "\ufeff", "<think>", *CONTROL]  # fmt: skip
KINDS = ("gpt2", "smollm", "llama-bpe", "qwen2", "sentencepiece", "metaspace", "gemma", "other")
SENTENCEPIECE = ("sentencepiece", "metaspace", "gemma")


def strings(count: int, seed: int = 5) -> list[str]:
    """Return texts of Unicode, control tokens and code."""
    rng = random.Random(seed)

    def part() -> str:
        if rng.random() < 0.5:
            return rng.choice(SPELLINGS)
        if rng.random() < 0.7:
            return "".join(chr(rng.randrange(32, 127)) for _ in range(rng.randrange(1, 9)))
        code = rng.choice([rng.randrange(0xA0, 0xD800), rng.randrange(0xE000, 0x20000)])
        return chr(code) if rng.random() < 0.5 else rng.choice(CORPUS)[: rng.randrange(40)]

    return ["".join(part() for _ in range(rng.randrange(12))) for _ in range(count)]


def train(kind: str) -> Tokenizer:
    """Return a trained tokenizer of one of `KINDS`."""
    if kind in SENTENCEPIECE:
        return _sentencepiece(kind)
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind in ("gpt2", "smollm"))
    steps: list[Any] = [byte_level]
    if kind == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), byte_level]
    elif kind in ("llama-bpe", "qwen2"):
        original = {"llama-bpe": splits.LLAMA3, "qwen2": splits.QWEN2}[kind].originals[0]
        steps = [pre_tokenizers.Split(Regex(original), "isolated"), byte_level]
    elif kind == "other":
        steps = [pre_tokenizers.Split(Regex(r"\w+|\W"), "isolated"), byte_level]
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    tokenizer.normalizer = normalizers.NFC() if kind == "qwen2" else None
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False,
        special_tokens=list(CONTROL),
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    if kind == "llama-bpe":
        bos = CONTROL[0]
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, 0)])
    return tokenizer


@cache
def _trained(kind: str) -> str:
    return train(kind).to_str(pretty=True)


def _sentencepiece(kind: str) -> Tokenizer:
    """Return a tokenizer in the form of Llama 2 (`sentencepiece`), of newer conversions (`metaspace`), or of Gemma."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    merges = [tuple(m) for m in json.loads(trained.to_str())["model"]["merges"]]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(trained.get_vocab())]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if kind == "sentencepiece":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("\n\n", "\t\t", "<table>")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * (kind != "gemma"))
    special = [AddedToken(text, normalized=False, special=True) for text in ("<unk>", "<s>", "</s>", *CONTROL)]
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def write(folder: Path, kind: str, **config: Any) -> Path:
    """Write the tokenizer files of a model into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_trained(kind))
    is_spm = kind in SENTENCEPIECE
    named = {"bos_token": "<s>", "eos_token": "</s>"} if is_spm else {"bos_token": CONTROL[0], "eos_token": CONTROL[2]}
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


def gguf_metadata(kind: str, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """Return what a GGUF file says of a tokenizer: byte-level BPE, or SentencePiece with scores instead of merges."""
    tokenizer = tokenizer or train(kind)
    by_id = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    tokens = [by_id[i] for i in range(len(by_id))]
    added = {i: token.special for i, token in tokenizer.get_added_tokens_decoder().items()}
    kinds = [(3 if added[i] else 4) if i in added else 1 for i in range(len(tokens))]
    metadata: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    if kind in ("sentencepiece", "metaspace"):
        merges = json.loads(tokenizer.to_str())["model"]["merges"]
        rank = {"".join(pair): -float(n) for n, pair in reversed([*enumerate(merges)])}
        scores = [rank.get(token, -1e6) for token in tokens]
        ids = {"bos": 1, "eos": 2, "unknown": 0}
        metadata |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
    else:
        merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
        ids = {"bos": 0, "eos": 2}
        pre = "gpt-2" if kind == "gpt2" else kind
        metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": merges}
    return metadata | {f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items()}


# Chat templates in the style of ChatML, Qwen 3 and Mistral.
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3 = """{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' ~ content ~ '<|im_end|>\\n' }}
    {%- endif %}
    {%- if loop.index0 > 50 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}{% generation %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endgeneration %}
{%- endif %}
"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant!') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<|im_start|>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>model\n' }}{%- endif -%}
"""

# Templates with tools, in the shape of the published ones.
_TOOLS = """{%- if tools %}{{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' + (tool_call.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}%s{%- endif %}
"""
_NO_THINKING = """{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"""
_LLAMA = """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|im_start|>system\\n\\n" + system + "<|im_end|>" }}
{%- if tools is not none %}
    {{- '<|im_start|>user\\n\\nRespond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- messages[0]['content'] | trim + "<|im_end|>" }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{- "<|im_start|>ipython\\n\\n" + message.content + "<|im_end|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("This model only supports single tool-calls at once!") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}<|im_end|>" }}
    {%- else %}{{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}
"""
_MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.first %}
            {{- "[AVAILABLE_TOOLS][" }}{%- for tool in tools %}{{- tool.function | tojson }}{%- endfor %}{{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS][" }}
        {%- for tool_call in message.tool_calls %}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- tool_call.function | tojson }}{{- ', "id": "' + tool_call.id + '"}' }}
        {%- endfor %}
        {{- "]" + eos_token }}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {%- if not message.tool_call_id is defined or message.tool_call_id | length != 9 %}
            {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
        {%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
TOOL_TEMPLATES = {
    "qwen2.5": _TOOLS.replace("%s", ""), "qwen3": _TOOLS.replace("%s", _NO_THINKING), "hermes": _TOOLS.replace("%s", ""),
    "llama3": _LLAMA, "mistral": _MISTRAL, "smollm2": CHATML,
}  # fmt: skip


@cache
def with_template(family: str) -> TextTokenizer:
    """Return a tokenizer with the chat template of a family of `TOOL_TEMPLATES`; to compile it takes longer than a test."""
    with TemporaryDirectory() as folder:
        (write(Path(folder), "smollm") / "chat_template.jinja").write_text(TOOL_TEMPLATES[family])
        return TextTokenizer(from_folder(Path(folder)))
