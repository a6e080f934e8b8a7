"""Shared by the scripts of agents: two tools, an answer that free text cannot be, and the checks of a finished loop."""

import contextlib
import json
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

TASK = "How warm is it in Oslo, and how many people live there? Use the tools."
NEEDS = {"role": "user", "content": "Describe an animal."}
CALLED = []  # the calls of the tools since the last loop ended

City = Literal["Oslo", "Rome"]
CITIES = get_args(City)


class Home(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: City
    indoors: bool


class Animal(BaseModel):
    """An animal."""

    model_config = ConfigDict(extra="forbid")  # strict: what is not named here must not be in an answer
    kind: Literal["cat", "dog"]
    legs: int
    home: Home


def temperature(city: City, days: int) -> str:
    """Return the temperature of a city in some days.

    Args:
        city: The name of the city.
        days: In how many days.
    """
    CALLED.append(("temperature", city, days))
    return f"{city} has 20 degrees"


def population(city: City) -> str:
    """Return the number of people who live in a city.

    Args:
        city: The name of the city.
    """
    CALLED.append(("population", city, 0))
    return f"{city} has 700000 people"


FUNCTIONS = {"temperature": temperature, "population": population}


def parameters(name: str) -> dict:
    """Return the JSON schema of a tool's arguments."""
    schema = TypeAdapter(FUNCTIONS[name]).json_schema()
    return {**schema, "additionalProperties": False}


def openai_tools() -> list:
    """Return both tools as a request for a chat names them."""
    return [
        {"type": "function", "function": {"name": name, "description": f.__doc__, "parameters": parameters(name)}}
        for name, f in FUNCTIONS.items()
    ]


def call(name: str, arguments: dict | str) -> str:
    """Call a tool as a model asked for it; arguments of a wrong type are an error."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return FUNCTIONS[name](**given)


def chat_loop(complete) -> str | None:
    """Let `complete(messages)` return messages in OpenAI's form until one calls no tool; return the text of the last."""
    messages = [{"role": "user", "content": TASK}]
    for _ in range(5):
        m = complete(messages)
        if not m.tool_calls:
            break
        results = [(k.id, call(k.function.name, k.function.arguments)) for k in m.tool_calls]
        messages += [m.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": id_, "content": text} for id_, text in results]
    return m.content


def is_animal(text: str) -> bool:
    """Whether a text is the JSON of an animal."""
    with contextlib.suppress(ValidationError):
        return bool(Animal.model_validate_json(text))
    return False


def ended(c, name: str, answer: object, cities: tuple | None = CITIES) -> None:
    """Check that a loop has called a tool with valid arguments, and then answered in words; None allows any city.

    A small model may also answer at once, or call tools until the client stops it: without STRICT=1, that is a warning.
    """
    right = [k for k in CALLED if (k[1] in cities if cities else isinstance(k[1], str)) and type(k[2]) is int]
    c.ok(f"{name}: the arguments are valid", right == CALLED, CALLED)
    c.warn(f"{name}: a tool was called", CALLED)
    c.warn(f"{name}: the end is a text", isinstance(answer, str) and answer.strip(), repr(answer))
    CALLED.clear()
