"""Fields of other servers' requests that change the answer, and that the server refuses because it lacks them.

The names are those of OpenAI, vLLM, SGLang, llama.cpp, TGI, transformers and services that extend OpenAI's API, and also
those that only some of the dialects here have. Beside each are the values that change nothing; a request with one of
these, or with null, is accepted. All others are refused with 400 (`api/schemas/body.py`), whatever other fields they
depend on. To support a field in a dialect, add it to that dialect's schema: a schema's own fields come first.

Fields that are neither here nor in a schema do not change the answer, such as `metadata`, `store`, `service_tier`,
`cache_prompt` or `dry_base` (without `dry_multiplier`). They are ignored and named in X-Ignored-Params.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, GetJsonSchemaHandler

Unsupported = Mapping[str, tuple[Any, ...]]

LLAMA_CPP_SAMPLERS = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]

# Of every dialect that does not have the field itself.
EVERYWHERE: Unsupported = {
    # The form of the answer
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (), "guided_whitespace_pattern": (),
    "guided_decoding_backend": (), "guided_decoding": (), "structured_outputs": (), "structural_tag": (),
    "response_format": ({"type": "text"},), "json_schema": (), "regex": (), "ebnf": (), "grammar": ("",),
    "n_indent": (0,), "format": ("",), "output_format": (), "output_config": ({},), "extra_body": ({},),
    "text": ({}, {"format": {"type": "text"}}),
    # Beams, and several answers
    "use_beam_search": (False,), "num_beams": (1,), "num_beam_groups": (1,), "diversity_penalty": (0,),
    "length_penalty": (1,), "early_stopping": (False,), "n": (1,), "best_of": (1,), "num_return_sequences": (1,),
    # Sampling
    "do_sample": (True,), "min_p": (0,), "typical_p": (1,), "typ_p": (1,), "top_a": (0,), "tfs": (1,), "tfs_z": (1,),
    "top_n_sigma": (-1, 0), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "min_keep": (0,), "xtc_probability": (0,),
    "dynatemp_range": (0,), "dynamic_temperature": (False,), "smoothing_factor": (0,), "adaptive_target": (-1,),
    "mirostat": (0,), "mirostat_mode": (0,), "penalty_alpha": (0,), "guidance_scale": (1,), "negative_prompt": ("",),
    "samplers": ([], LLAMA_CPP_SAMPLERS, "edskypmxt"), "sampler_priority": ([],), "random_seed": (), "sampling_seed": (),
    "repetition_penalty": (1,), "repeat_penalty": (1,), "presence_penalty": (0,), "frequency_penalty": (0,),
    "dry_multiplier": (0,), "no_repeat_ngram_size": (0,), "logit_bias": ({}, []), "bad_words": ([],),
    "bad_words_ids": ([],), "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "forced_bos_token_id": (),
    "forced_eos_token_id": (), "force_words_ids": ([],), "sequence_bias": ({}, []), "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (), "ban_eos_token": (False,), "stopping_strings": ([],), "eos_token_id": (),
    "spaces_between_special_tokens": (True,), "sampling_params": ({},), "instructions": ("",),
    "allowed_token_ids": (), "logits_processors": ([],), "custom_logit_processor": ("",),
    "custom_params": ({},), "vllm_xargs": ({},), "watermark": (False,),
    # Length and end
    "max_completion_tokens": (), "max_new_tokens": (), "n_predict": (),
    "max_length": (), "max_time": (), "t_max_predict_ms": (-1, 0), "min_tokens": (0,), "min_new_tokens": (0,),
    "min_length": (0,), "ignore_eos_token": (False,), "stop_sequences": ([],), "stop_strings": ([],),
    "stop_regex": ("", []), "stop_token_ids": ([],), "include_stop_str_in_output": (False,), "no_stop_trim": (False,),
    "repetition_detection": (),
    # The prompt
    "suffix": ("",), "echo": (False,), "truncate": (), "truncate_prompt_tokens": (), "truncation_side": ("left",),
    "add_special_tokens": (True,), "prompt_embeds": (), "input_embeds": (), "system_prompt": ("",),
    "safe_prompt": (False,), "session_params": (), "kv_transfer_params": (), "multi_modal_data": (),
    "multimodal_data": ([],), "image_data": ([],), "audio_data": ([],), "video_data": ([],), "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    # Chats
    "add_generation_prompt": (True,), "continue_final_message": (False,), "chat_template": (),
    "chat_template_kwargs": ({},), "apply_chat_template": (False,), "documents": ([],), "tools": ([],),
    "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"), "web_search_options": (),
    "search_parameters": (), "enable_search": (False,), "modalities": ([], ["text"]), "audio": (), "prediction": (),
    "verbosity": ("medium",), "reasoning_effort": ("none",), "reasoning": ({},), "reasoning_format": ("none", "auto"),
    "include_reasoning": (True,), "enable_thinking": (), "thinking": (), "thinking_budget": (),
    "thinking_token_budget": (), "thinking_budget_tokens": (-1,),
    # What is told of the tokens
    "logprobs": (False,), "top_logprobs": (0,), "prompt_logprobs": (), "logprob_token_ids": ([],), "n_probs": (0,),
    "top_n_tokens": (0,), "return_k_alternatives": (0,), "details": (False,), "decoder_input_details": (False,),
    "return_full_text": (False,), "return_tokens": (False,), "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,), "return_hidden_states": (False,), "skip_special_tokens": (True,),
    # Adapters
    "adapter": (), "adapter_id": (), "adapter_source": (), "adapter_parameters": (), "lora": ([],), "lora_path": (),
    "lora_request": (),
}  # fmt: skip

NATIVE: Unsupported = {
    **EVERYWHERE, "skip_special_tokens": (False,), "return_full_text": (True,), "echo": (False, True),
}  # fmt: skip
EMBEDDINGS: Unsupported = {
    **EVERYWHERE, "stream": (False,), "stream_options": (), "messages": ([],), "normalize": (True,), "task": (),
    "embed_dtype": ("float32",), "endianness": ("native", "little"), "input_type": (), "prompt_name": (),
    "late_chunking": (False,), "embedding_type": ("float",), "output_dtype": ("float",), "output_dimension": (),
}  # fmt: skip
CHAT: Unsupported = {**EVERYWHERE, "add_special_tokens": (False,), "n_predict": (-1,)}
RESPONSES: Unsupported = {
    **EVERYWHERE, "background": (False,), "conversation": (), "prompt": (), "context_management": ([],),
    "truncation": ("disabled",), "include": ([], ["reasoning.encrypted_content"]), "messages": ([],), "max_tokens": (),
}  # fmt: skip
TGI: Unsupported = {**EVERYWHERE, "ignore_eos": (False,), "include_stop_str_in_output": (True,)}
OLLAMA: Unsupported = {**EVERYWHERE, "images": ([],), "template": ("",), "context": ([],), "truncate": (False, True)}
TOKENIZE: Unsupported = {
    "continue_final_message": (False,), "chat_template": (), "chat_template_kwargs": ({},), "documents": ([],),
    "tools": ([],), "functions": ([],), "mm_processor_kwargs": ({},), "media_io_kwargs": ({},), "truncate": (),
    "truncate_prompt_tokens": (), "return_token_strs": (False,),
}  # fmt: skip
MESSAGES: Unsupported = {**EVERYWHERE, "stop": ([],), "container": (), "mcp_servers": ([],)}
MESSAGE: Unsupported = {"prefix": (False,), "partial": (False,), "function_call": ()}  # of a chat


def changes_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return whether a value is null or one of the neutral ones; unlike in Python, 0 is not false."""
    return value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


class Refusing(BaseModel):
    """A body or an object in it, with the fields that are refused unless they have one of the values beside them."""

    unsupported: ClassVar[Unsupported] = {}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core)
        refused = {name: [*neutral] for name, neutral in cls.unsupported.items() if name not in cls.model_fields}
        # As properties they would make the document, and its readers, several times as slow.
        handler.resolve_ref_schema(schema)["x-unsupported"] = refused
        return schema
