"""Generating text from a key-value cache, several interventions side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import call_model, logits_of
from kvprobe.engine.interventions import AttentionKnockout, KVPatch, PatchRow, check_patches
from kvprobe.engine.masks import plan_masks
from kvprobe.engine.operations import overwrite
from kvprobe.engine.sweep import as_row, before_decision
from kvprobe.errors import NoEffectError, UnsupportedError
from kvprobe.models.subject import Subject
from kvprobe.tasks.context import encode_segment


@dataclass(frozen=True, eq=False)
class Generation:
    """What one row generated.

    Attributes:
        token_ids: the generated tokens, an end token or those of a stop text included.
        cache: one row: the prompt as the row saw it, then every generated token but the last, which was not run.
        censored: whether the limit came before an end token or a stop text did.
        stop_length: how many tokens at the end hold the stop text; 0 where none was written.
    """

    token_ids: tuple[int, ...]
    cache: KVCache
    censored: bool
    stop_length: int = 0


def generate(
    subject: Subject,
    base_ids: Sequence[int],
    base_cache: KVCache,
    rows: Sequence[PatchRow],
    *,
    limit: int,
    stop: Sequence[str] = (),
    ends: Sequence[int] | None = None,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[Generation]:
    """Continue a prompt under each of many interventions.

    All rows run in one batch. With a temperature they share their random numbers, so two arms differ only by what
    was done to them (critique G10).

    Args:
        subject: the model.
        base_ids: the whole prompt; its last token is run first.
        base_cache: its cache, with or without the last token's entry (which is never used).
        rows: as in `kvprobe.engine.sweep.run_patches`. A knockout acts at every step whose token stands at one of its
            queries: the prompt's last position, then one more for each token.
        limit: most tokens to generate.
        stop: texts that end a row. They are compared with the generated text, not token by token: a line break ends a
            row at a token of two line breaks too. What follows in the last token stays.
        ends: tokens that end a row; None for those that end the model's texts, see `Subject.end_ids`.
        temperature: 0 for the most likely token.
        generator: on the CPU; needed with a temperature.

    Raises:
        NoEffectError: a patch changes nothing or no step runs a query of a knockout, and neither is declared a no-op.
        UnsupportedError: no row, no room for a token, or a temperature without a generator.
    """
    _check(rows, limit, temperature, generator)
    past, start = before_decision(base_ids, base_cache)
    chosen = [as_row(row) for row in rows]
    check_patches(past, (item for row in chosen for item in row if isinstance(item, KVPatch)))
    running = _Running(subject, past, start, chosen)
    tokens = torch.full((len(rows),), base_ids[-1], dtype=torch.long)
    written: list[list[int]] = [[] for _ in rows]
    last_tokens = frozenset(subject.end_ids if ends is None else ends)
    stops = _Stops(subject.tokenizer, stop, base_ids[-1])
    lengths = [0] * len(rows)
    open_rows = set(range(len(rows)))
    for _ in range(limit):
        tokens = _choose(running.step(tokens), temperature, generator)
        for row in sorted(open_rows):
            written[row].append(int(tokens[row]))
            lengths[row] = stops.length(written[row])
            if lengths[row] or written[row][-1] in last_tokens:
                open_rows.remove(row)
        if not open_rows:
            break
    running.check_knockouts()
    return [
        Generation(tuple(ids), running.row(row, len(past) + len(ids)), row in open_rows, lengths[row])
        for row, ids in enumerate(written)
    ]


def _check(rows: Sequence[PatchRow], limit: int, temperature: float, generator: torch.Generator | None) -> None:
    if not rows or limit < 1:
        raise UnsupportedError("Generation needs at least one row and room for at least one token.")
    if temperature > 0 and generator is None:
        raise UnsupportedError("Sampling needs a generator; pass a seeded torch.Generator.")


class _Running:
    """A batch under way: its cache, its position, and which knockouts have met one of their queries."""

    def __init__(
        self, subject: Subject, past: KVCache, start: int, rows: Sequence[Sequence[KVPatch | AttentionKnockout]]
    ) -> None:
        self.subject = subject
        self.bases = [_patched(past, [item for item in row if isinstance(item, KVPatch)]) for row in rows]
        self.knockouts = [[item for item in row if isinstance(item, AttentionKnockout)] for row in rows]
        self.waiting = {item for row in self.knockouts for item in row if not item.no_op}
        self.first = len(past)
        self.prompt = past
        self.positions = past.positions
        self.next = start
        self.past = KVCache.computed(
            [
                (torch.cat([layer.keys for layer in layers]), torch.cat([layer.values for layer in layers]))
                for layers in zip(*(base.layers for base in self.bases), strict=True)
            ],
            past.positions,
        ).to_hugging_face()

    def step(self, tokens: Tensor) -> Tensor:
        """Logits `[row, vocab]` after `tokens` `[row]`."""
        place = torch.tensor([self.next])
        self.positions = torch.cat([self.positions, place])
        active = [[item for item in row if self.next in item.queries] for row in self.knockouts]
        # Over a whole generation: whether something was hidden at all is judged at its end.
        silent = [[replace(item, no_op=True) for item in row] for row in active]
        seen = torch.ones(1, len(self.positions), dtype=torch.bool)
        plan = plan_masks(self.subject, place, self.positions, seen, silent)
        self.waiting -= {item for row in active for item in row if not {*item.keys}.isdisjoint(self.positions.tolist())}
        self.next += 1
        axes = self.prompt.text_axes(place)
        output = call_model(self.subject, tokens[:, None], place, self.past, plan, axes=axes)
        return logits_of(output, self.subject).cpu()

    def check_knockouts(self) -> None:
        """Refuse a knockout that met none of its queries together with one of its keys."""
        if self.waiting:
            raise NoEffectError(
                "An attention knockout hid nothing during generation: no token stood at one of its queries after one "
                "of its keys; check the positions, or declare no_op."
            )

    def row(self, number: int, length: int) -> KVCache:
        """One row's cache of `length` entries."""
        base, first = self.bases[number], self.first
        new = [
            (layer.keys[number : number + 1, :, first:length], layer.values[number : number + 1, :, first:length])
            for layer in self.past.layers
        ]
        places = self.positions[first:length]
        return KVCache.join([base, KVCache.computed(new, places, self.prompt.text_axes(places))])


def _patched(base: KVCache, patches: Sequence[KVPatch]) -> KVCache:
    for patch in patches:
        base, _ = overwrite(base, patch.positions, patch.donor, patch.layers, no_op=True)
    return base


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """One token for each row of `logits` `[row, vocab]`: the best, or a draw by the Gumbel-max trick."""
    if temperature <= 0:
        return logits.argmax(-1)
    uniform = torch.rand(logits.shape[-1], generator=generator, dtype=torch.float64)
    return (logits.double() / temperature - (-uniform.log()).log()).argmax(-1)


class _Stops:
    """Texts that end a generation behind the token `before`, found at the end of what is written."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], before: int) -> None:
        self._tokenizer, self._before = tokenizer, before
        # A tokenizer of words reads its own tokens back with blanks between them.
        read_back = [self._decoded(encode_segment(text, tokenizer)) for text in texts]
        self._texts = tuple(dict.fromkeys(text for text in (*texts, *read_back) if text))
        # A token that adds nothing to the text, such as half a character, may stand among those that do.
        self._reach = 2 * max((len(text.encode()) for text in self._texts), default=0)

    def length(self, written: Sequence[int]) -> int:
        """How few of the last tokens hold one of the texts; 0 where they do not."""
        if not self._texts or not self._holds(written[-self._reach :], written[: -self._reach]):
            return 0
        counts = range(1, len(written) + 1)
        return next(count for count in counts if self._holds(written[-count:], written[:-count]))

    def _holds(self, tokens: Sequence[int], earlier: Sequence[int]) -> bool:
        # Some tokenizers drop a blank before the first token that they are given.
        anchor = [earlier[-1] if earlier else self._before]
        text = self._decoded([*anchor, *tokens])[len(self._decoded(anchor)) :]
        return any(stop in text for stop in self._texts)

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
