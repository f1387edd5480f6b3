"""How far a chunk may be moved (protocol 6.1, 19 portability_by_offset; critique CO3, CO4): 0 to 32,768 positions.

Three measurements, each with keys rotated to where they stand and with keys left as they were:

    keys       the rule is compiled alone at position 0, moved by an offset, and compared with a native prefill of it
               that begins there; `chained`: the same after 64 small moves to the largest offset
    offset     the whole prompt stands N positions on, with no token before it. Its native prefill there is the
               reference. The rule is compiled at the beginning and moved there.
    filler     N tokens of neutral notes stand between the prompt's first line and the rule, as the paper's prompts
               have it

Arms of `offset` and `filler`: `rotated` and `no_rotation` (compiled behind a neutral line); the same `_in_context`,
compiled behind what stands before the rule in the prompt, so that the move is all that differs from the reference
(offsets only); and `removed`, the floor: no rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field

from kvprobe.composing.base import ReuseScheme, make_scheme
from kvprobe.composing.chunk import Chunk, precompile
from kvprobe.composing.prompts import compile_segment
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.operations import reposition
from kvprobe.engine.readout import read
from kvprobe.errors import ConfigError
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.gating import gate_columns
from kvprobe.probes.kit.fidelity import REMOVED, reference_of
from kvprobe.tasks.context import Span, encode_segment
from kvprobe.tasks.library import filler_notes
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

ARMS = ("rotated", "rotated_in_context", "no_rotation", "no_rotation_in_context", REMOVED)
MOVES = 64
_CHUNK = "policy"
# A model's own positions are rounded: it multiplies them by its frequencies in float32, so that an angle is off by up
# to position x 2^-24, the unit of `rounding_units`.
_ROUNDING = 2.0**-24
_SCHEMES: Mapping[str, ReuseScheme] = {"rotated": make_scheme("splice"), "no_rotation": make_scheme("no_rotation")}


@PROBES.register("offsets")
class Offsets(Probe):
    """A chunk moved by up to 32,768 positions: its keys, and the decisions behind it."""

    offsets: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (0, 64, 1024, 4096, 16384, 32768), min_length=1, description="positions that a chunk is moved by"
    )
    fillers: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (64, 256, 1024), description="tokens of notes put before the rule"
    )

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair rows of its keys at each offset and of the base's and donor's decisions at each offset and filler.

        Raises:
            ConfigError: a pair's rule, segment `policy`, does not stand between something and the field.
            UnsupportedError: the model's RoPE scaling does not allow moving.
        """
        # Offsets beyond the model's positions are asked for by name: what holds of moved keys is arithmetic.
        subject = subject.extrapolating()
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            gate = _gate(subject, pair)
            made = [*_key_rows(subject, pair, self.offsets), *self._decision_rows(subject, pair)]
            rows += [{"pair": index, **gate, **row} for row in made]
            progress(index + 1, len(pairs))
        return rows

    def _decision_rows(self, subject: Subject, pair: Pair) -> Iterator[Measurement]:
        at = _rule(pair)
        ids = pair.base.token_ids[at.start : at.end]
        neutral = {"": precompile(subject, ids, "neutral")}
        chunks = {**neutral, "_in_context": compile_segment(subject, pair.base, _CHUNK, "real")}
        for offset in self.offsets:
            before = prefill(subject, pair.base.token_ids[: at.start], offset=offset).cache
            for row in _placed_rows(subject, pair, before, chunks):
                yield {"measurement": "offset", "size": offset, **row}
        for tokens in self.fillers:
            notes = filler_ids(tokens, subject.tokenizer)
            before = prefill(subject, (*pair.base.token_ids[: at.start], *notes)).cache
            for row in _placed_rows(subject, pair, before, neutral):
                yield {"measurement": "filler", "size": tokens, **row}


def filler_ids(tokens: int, tokenizer: Any) -> list[int]:
    """That many tokens of neutral notes, repeated and cut to length."""
    notes = encode_segment("".join(f"{note}\n" for note in filler_notes()), tokenizer)
    return [notes[place % len(notes)] for place in range(tokens)]


def key_error(moved: KVCache, native: KVCache) -> list[float]:
    """For each layer the largest norm of a key's error over the norm of the native key, over heads and positions."""
    errors = []
    for ours, theirs in zip(moved.layers, native.layers, strict=True):
        native_keys = theirs.keys.double()
        error = (ours.keys.double() - native_keys).norm(dim=-1) / native_keys.norm(dim=-1)
        errors.append(float(error.max()))
    return errors


def _placed_rows(subject: Subject, pair: Pair, before: KVCache, chunks: Mapping[str, Chunk]) -> Iterator[Measurement]:
    """Decisions of both prompts behind `before`, each arm against the rule run there.

    `chunks` are named by what the names of their arms end with.
    """
    at = _rule(pair)
    placed = {
        f"{name}{ending}": scheme.place(subject, before, chunk).cache
        for name, scheme in _SCHEMES.items()
        for ending, chunk in chunks.items()
    }
    placed[REMOVED] = before
    ids = pair.base.token_ids[at.start : at.end]
    native = forward(subject, ids, before).cache
    for donor, prompt in ((False, pair.base), (True, pair.donor)):
        rest = prompt.token_ids[at.end :]
        reference = reference_of(subject, pair, donor=donor, logits=forward(subject, rest, native).logits)
        for arm, cache in placed.items():
            yield {"arm": arm, **reference.compare(forward(subject, rest, cache).logits)}


def _gate(subject: Subject, pair: Pair) -> Measurement:
    """What the inclusion gate reads, of the prompts as they are; the noise is that of running them in two pieces."""
    answers, at = (pair.base_answer_id, pair.donor_answer_id), _rule(pair).start
    whole = [read(prefill(subject, prompt.token_ids).logits, *answers) for prompt in (pair.base, pair.donor)]
    before = prefill(subject, pair.base.token_ids[:at]).cache
    again = read(forward(subject, pair.base.token_ids[at:], before).logits, *answers)
    return gate_columns(whole[0], whole[1], abs(again.margin - whole[0].margin))


def _key_rows(subject: Subject, pair: Pair, offsets: Sequence[int]) -> Iterator[Measurement]:
    """The rule's keys at each offset, by kind of layer, and after many small moves to the largest."""
    span = _rule(pair)
    ids = pair.base.token_ids[span.start : span.end]
    compiled = prefill(subject, ids).cache
    kinds = [kind.removesuffix("_attention") for kind in subject.architecture.layer_types(subject.config)]
    for offset in offsets:
        native = prefill(subject, ids, offset=offset).cache
        moved, _ = reposition(subject, compiled, offset)
        rotated, unrotated = key_error(moved, native), key_error(compiled, native)
        unit = (offset + len(ids)) * _ROUNDING + torch.finfo(subject.dtype).eps
        for kind in dict.fromkeys(kinds):
            layers = [layer for layer, other in enumerate(kinds) if other == kind]
            worst = max(rotated[layer] for layer in layers)
            yield {
                "measurement": "keys",
                "size": offset,
                "kind": kind,
                "rotated_error": worst,
                "unrotated_error": max(unrotated[layer] for layer in layers),
                "rounding_units": worst / unit,
            }
    yield _chained_row(subject, compiled, ids, max(offsets))


def _chained_row(subject: Subject, compiled: KVCache, ids: Sequence[int], offset: int) -> Measurement:
    """The error of 64 moves beyond that of one to the same place."""
    native = prefill(subject, ids, offset=offset).cache
    once, _ = reposition(subject, compiled, offset)
    stepped = compiled
    for step in range(MOVES):
        stepped, _ = reposition(subject, stepped, offset * (step + 1) // MOVES - offset * step // MOVES)
    one, many = max(key_error(once, native)), max(key_error(stepped, native))
    return {"measurement": "chained", "size": offset, "rotated_error": one, "excess": many - one}


def _rule(pair: Pair) -> Span:
    """Where the rule stands: behind something, and before the field, so that it is the same in both prompts."""
    span = pair.base.spans.get(_CHUNK)
    if span is None or not span.start or span.start > pair.field.start:
        raise ConfigError(
            "The probe offsets moves a rule that stands between the prompt's first line and the field: use task "
            "field_position with slots other than 'start'."
        )
    return span
