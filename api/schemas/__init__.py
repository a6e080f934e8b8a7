"""The schemas of requests in each dialect."""

from api.schemas.native import InferenceRequest
from api.schemas.openai import ChatRequest, CompletionRequest
from api.schemas.tgi import CompatRequest, GenerateParameters, GenerateRequest, StreamRequest
from api.schemas.tokens import DetokenizeRequest, TokenizeRequest

__all__ = [
    "ChatRequest",
    "CompatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerateParameters",
    "GenerateRequest",
    "InferenceRequest",
    "StreamRequest",
    "TokenizeRequest",
]
