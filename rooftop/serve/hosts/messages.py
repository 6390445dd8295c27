"""Requests and tokens as messages of a link (``link``); no JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rooftop.core.records import field_values
from rooftop.serve.engine.requests import Constraint, Sampling, Token


def sampling_fields(settings: Sampling) -> dict[str, Any]:
    """``how`` as JSON, without its constraint."""
    sampling = field_values(settings)
    del sampling["constraint"]
    return sampling | {"stop_tokens": sorted(settings.stop_tokens), "logit_bias": list(settings.logit_bias.items())}


def sampling_of(fields: Mapping[str, Any], constraint: Constraint | None) -> Sampling:
    """The sampling in JSON ``fields``, with a ``constraint`` of this process."""
    return Sampling(
        **{
            **fields,
            "stop_tokens": frozenset(fields["stop_tokens"]),
            "logit_bias": dict(fields["logit_bias"]),
            "constraint": constraint,
        }
    )


def token_fields(token: Token) -> list[Any]:
    """A token as JSON."""
    return [token.id, token.token, token.logprob, token.top, token.finish, token.message]


def token_of(fields: Sequence[Any], id: int) -> Token:
    """The token of request ``id`` in JSON ``fields``."""
    _, token, logprob, top, finish, message = fields
    best = tuple((int(other), float(value)) for other, value in top)
    return Token(id=id, token=token, logprob=logprob, top=best, finish=finish, message=message)
