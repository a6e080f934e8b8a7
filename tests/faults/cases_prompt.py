"""B: prompts, tokens and sampling parameters. The app refuses what cannot be; here is what a full batch may not change."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from harness import SLOTS, Watched
from table import LOOPS, Case, body, text_of

NEIGHBOURS = [body("/inference", prompt=f"neighbour {i}", tokens=300, seed=i) for i in range(SLOTS - 1)]
ERRORS, COMPLETIONS, FIELDS, CHAT, DIALECTS = (
    f"tests/api/test_{name}.py::test_"
    for name in ("native_errors", "completions", "completion_fields", "chat", "dialects")
)
BAD_FIELD = f"{FIELDS}a_bad_field_is_refused_before_anything_is_computed"


def neighbours(server: Watched) -> list[str]:
    """Return what seven requests at once are told."""
    with ThreadPoolExecutor(len(NEIGHBOURS)) as pool:
        answers = pool.map(lambda sent: server.ask("/inference", sent), NEIGHBOURS)
        return [text_of("/inference", answer) for answer in answers]


def company_changes_nothing(server: Watched) -> None:
    sent = body("/inference", tokens=40, temperature=0)
    alone = text_of("/inference", server.ask("/inference", sent))
    with ThreadPoolExecutor(SLOTS) as pool:
        others = pool.map(lambda each: server.ask("/inference", each), NEIGHBOURS)
        together = [pool.submit(server.ask, "/inference", sent) for _ in range(3)]
        assert {text_of("/inference", each.result()) for each in together} == {alone}
        assert {answer.status for answer in others} == {200}


CASES = [
    Case("B1", "an empty prompt", tests=(BAD_FIELD,)),
    Case("B2", "end-of-text in the prompt",
         tests=(f"{COMPLETIONS}end_of_text_in_a_prompt_is_the_token_unless_the_server_says_no",)),
    Case("B3", "a prompt of the whole context", tests=(f"{ERRORS}a_prompt_that_fills_the_context_leaves_no_room",)),
    Case("B4", "lists of prompts, and of too many",
         tests=(f"{COMPLETIONS}a_prompt_comes_in_four_forms", f"{FIELDS}a_huge_list_is_refused_quickly")),
    Case("B5", "ids beyond the vocabulary", tests=(BAD_FIELD,)),
    Case("B6", "a prompt that cannot fit whatever its tokens", tests=(f"{ERRORS}what_cannot_fit_is_not_even_tokenized",)),
    Case("B7", "characters split over tokens in a stream",
         tests=("tests/api/test_streaming.py::test_what_a_reader_sees_joins_to_the_whole_text",)),
    Case("B8", "far too many choices", tests=(BAD_FIELD,)),
    Case("B9", "stops that are none, too many, too long, and those that cut",
         tests=(BAD_FIELD, f"{DIALECTS}no_part_of_a_stop_leaks")),
    Case("B10", "biases of strange ids, of too many, of no numbers", tests=(BAD_FIELD,)),
    Case("B11", "no length", tests=(f"{COMPLETIONS}sixteen_tokens_are_the_default",)),
    Case("B12", "flags that are no booleans", tests=(BAD_FIELD,)),
    Case("B13", "a model that is not served", tests=(f"{DIALECTS}what_cannot_be_is_refused_before_anything_is_computed",)),
    Case("B14", "chats of nobody, of strangers, of pictures",
         tests=(f"{CHAT}a_bad_chat_is_refused", f"{CHAT}a_picture_is_not_fetched")),
    Case("B15", "the same prompt alone and in a full batch", company_changes_nothing,
         policies=LOOPS, tests=("tests/generate/test_runner.py::test_the_text_of_a_request_does_not_depend_on_the_batch",)),
]  # fmt: skip
