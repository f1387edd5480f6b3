"""Activations inside the model, by their TransformerLens names: read, edited, differentiated.

TransformerLens' bridge rebuilds the module tree of the model it is given, so it gets a copy of the tree whose
parameters and buffers are the subject's own. Masks, positions and caches are those of every other pass of the
engine: windows and soft-capping act here as they do there.
"""

from __future__ import annotations

import difflib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvprobe.engine.bridge import HOOK_LEVEL, bridge_of, hook_points
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import call_model, logits_of, prefill
from kvprobe.engine.interventions import KVPatch, check_patches
from kvprobe.engine.masks import plan_masks
from kvprobe.engine.module_hooks import edited, has_place
from kvprobe.engine.planner import plan_batch
from kvprobe.engine.shared_prefix import cache_of_rows
from kvprobe.engine.sweep import in_batches
from kvprobe.errors import NoEffectError, NumericsError, UnsupportedError
from kvprobe.models.caching import check_fills_cache, empty_cache
from kvprobe.models.subject import Subject

# The bridge reads it where the MLP does, so a change there would miss the residual stream itself.
_READ_ONLY = "hook_resid_mid"
# Of all tokens of one batch: beyond it a CPU gains nothing from larger batches.
_TOKENS_AT_ONCE = 1024
# Largest difference from the subject's own logits, relative to their norm, that another kernel may make.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
_HALF_TOLERANCE = 5e-2

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class ActivationEdit:
    """One change of one activation.

    Attributes:
        hook: TransformerLens name, such as `blocks.3.attn.hook_z`.
        change: from the activation `[position, ...]` at `positions` to what replaces it, of the same shape.
        positions: absolute token positions; None for all tokens that are run.
        no_op: declares that the edit may change nothing; an undeclared one raises `NoEffectError`.
    """

    hook: str
    change: Change
    positions: tuple[int, ...] | None = None
    no_op: bool = False


@dataclass(frozen=True, eq=False)
class Captured:
    """What one pass read.

    Attributes:
        activations: by hook `[position, ...]`, the position axis first whatever the hook's own order is: `[position,
            head, head_dim]` for `hook_z`, `[query position, head, key]` for `hook_pattern`.
        logits: `[vocab]` at the last token, at least float32.
    """

    activations: dict[str, Tensor]
    logits: Tensor


def set_to(value: Tensor, *, head: int | None = None) -> Change:
    """A change to `value`, broadcast over positions; with `head` (axis 1) of that head alone.

    The change raises `UnsupportedError` where there is no such head.
    """

    def change(activation: Tensor) -> Tensor:
        new = value.to(activation)
        if head is None:
            return new.expand_as(activation)
        if not 0 <= head < activation.shape[1]:
            raise UnsupportedError(f"There is no head {head}; the heads here are 0 to {activation.shape[1] - 1}.")
        changed = activation.clone()
        changed[:, head] = new
        return changed

    return change


def add(vector: Tensor) -> Change:
    """A change that adds `vector`, broadcast over positions."""
    return lambda activation: activation + vector.to(activation)


class Components:
    """Components of one subject, bridged once; see `components`.

    Where `cache` is given, `token_ids` are only the tokens run after it and positions go on from its last one.

    Args:
        subject: the model; it is left as it is and shares its weights.

    Raises:
        UnsupportedError: the bridge does not know the architecture, does not fill a cache handed to it, or does not
            agree with the model.
    """

    hooks: tuple[str, ...]
    """Names of all activations that can be read and edited."""

    def __init__(self, subject: Subject) -> None:
        self._bridge = bridge = bridge_of(subject.architecture.bridgeable(subject.model), subject.name)
        self._subject = replace(subject, model=bridge.original_model)
        # Another object, so that what is kept for a subject does not keep it.
        self._own = replace(subject)
        check_fills_cache(bridge.original_model)
        self._points, self._axes = hook_points(bridge, subject.layers)
        self.hooks = tuple(self._points)
        self._check_agrees(subject)

    def capture(self, token_ids: Sequence[int], hooks: Sequence[str], *, cache: KVCache | None = None) -> Captured:
        """Activations at `hooks` of all tokens that are run.

        Raises:
            UnsupportedError: no such hook; with the nearest name.
        """
        kept: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[..., None]:
            def read(activation: Tensor, *, hook: Any) -> None:  # noqa: ARG001 - as TransformerLens calls it
                kept[name] = activation.movedim(self._axes[name], 1)[0].detach()

            return read

        with self._hooked({name: keep(name) for name in self._known(hooks)}):
            logits = self._call(token_ids, cache, 1)
        return Captured(kept, logits[0])

    def run(
        self,
        token_ids: Sequence[int],
        rows: Sequence[Sequence[ActivationEdit]],
        *,
        cache: KVCache | None = None,
        patches: Sequence[Sequence[KVPatch]] | None = None,
        batch_size: int | None = None,
        reduce: Callable[[Tensor], Tensor] | None = None,
        reference: bool = False,
    ) -> Tensor:
        """The last token's logits under each of many sets of edits.

        Edits that have a place at the model's own modules are made there, on one shared cache; all others, and all
        of a batch with one of them, through the bridge, with every row's cache laid out.

        Args:
            token_ids: tokens to run.
            rows: one set of edits each, applied in order; an empty one for the base itself.
            cache: entries before the tokens.
            patches: for each row, patches of `cache` that it runs on.
            batch_size: rows in one forward pass; by default what memory allows.
            reduce: applied to the logits `[row, vocab]` of each batch, to keep less than a whole vocabulary per row.
            reference: go through the bridge whatever is edited, as a check.

        Returns:
            On the CPU, `[row, vocab]` (at least float32) or what `reduce` makes of it.

        Raises:
            UnsupportedError: no such hook, `hook_resid_mid` (which can only be read), a position that is not run, a
                change of another shape, patches without a cache or not one set for each row.
            NoEffectError: a patch or an edit that is not declared a no-op changes nothing.
        """
        start = _next_position(cache)
        for edit in itertools.chain.from_iterable(rows):
            _check_positions(edit, range(start, start + len(token_ids)))
        self._editable([edit.hook for row in rows for edit in row])
        if patches is not None:
            if cache is None or len(patches) != len(rows):
                raise UnsupportedError("Patches need the cache they patch, and one set of them for each row.")
            check_patches(cache, itertools.chain.from_iterable(patches))

        def batch(first: int, last: int) -> Tensor:
            by_hook: dict[str, list[tuple[int, ActivationEdit]]] = {}
            for number, row in enumerate(rows[first:last]):
                for edit in row:
                    by_hook.setdefault(edit.hook, []).append((number, edit))
            acted: dict[ActivationEdit, Tensor] = {}
            editors = {name: _editor(edits, self._axes[name], start, acted) for name, edits in by_hook.items()}
            part = None if patches is None else patches[first:last]
            with self._hooked(editors) if bridged else edited(self._own, editors):
                logits = self._call(token_ids, cache, last - first, patches=part, bridged=bridged)
            _check_acted(acted)
            return (logits if reduce is None else reduce(logits)).cpu()

        bridged = reference or not all(has_place(edit.hook) for row in rows for edit in row)
        length = len(token_ids) + (0 if cache is None else len(cache))
        fits = plan_batch(self._own, length, len(token_ids), laid_out=bridged or not cache)
        if bridged:
            # The bridge lays keys and values out for every query head.
            fits //= 3
        fits = max(1, min(fits, _TOKENS_AT_ONCE // max(1, len(token_ids))))
        return in_batches(batch, len(rows), batch_size or fits)

    def gradients(
        self,
        token_ids: Sequence[int],
        hooks: Sequence[str],
        metric: Callable[[Tensor], Tensor],
        *,
        cache: KVCache | None = None,
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """For each hook its activation `[position, ...]` and the metric's derivative by it, of the same shape.

        Args:
            token_ids: tokens to run.
            hooks: names.
            metric: from logits `[vocab]` at the last token to a number.
            cache: entries before the tokens; they are constants.

        Raises:
            UnsupportedError: no such hook, or `hook_resid_mid`, which can only be read.
        """
        seen: dict[str, Tensor] = {}

        def enter(name: str) -> Callable[..., Tensor]:
            def differentiate(activation: Tensor, *, hook: Any) -> Tensor:  # noqa: ARG001
                # The weights need no gradient, so the first hook of the pass is where the graph begins.
                seen[name] = activation if activation.requires_grad else activation.detach().requires_grad_()
                return seen[name]

            return differentiate

        with self._hooked({name: enter(name) for name in self._editable(hooks)}):
            logits = self._call(token_ids, cache, 1, gradients=True)
            names = list(seen)
            derivatives = torch.autograd.grad(metric(logits[0]), [seen[name] for name in names], materialize_grads=True)

        def shown(name: str, tensor: Tensor) -> Tensor:
            return tensor.detach().movedim(self._axes[name], 1)[0]

        by_name = zip(names, derivatives, strict=True)
        return {name: (shown(name, seen[name]), shown(name, derivative)) for name, derivative in by_name}

    def output_weights(self, layer: int) -> Tensor:
        """What each head's `hook_z` is multiplied with on its way out, `[head, head_dim, hidden]` (`W_O`)."""
        weights: Tensor = self._bridge.blocks[layer].attn.W_O
        return weights.detach()

    def _call(
        self,
        token_ids: Sequence[int],
        cache: KVCache | None,
        rows: int,
        *,
        patches: Sequence[Sequence[KVPatch]] | None = None,
        gradients: bool = False,
        bridged: bool = True,
    ) -> Tensor:
        if not len(token_ids):
            raise UnsupportedError("There is no token to run.")
        if cache is not None and cache.batch != 1:
            raise UnsupportedError("Components run on one row of a cache; take one row first.")
        places = _next_position(cache) + torch.arange(len(token_ids))
        keys = places if cache is None else torch.cat([cache.positions, places])
        causal = torch.ones(len(places), len(keys), dtype=torch.bool).tril(len(keys) - len(places))
        subject = self._subject if bridged else self._own
        plan = plan_masks(subject, places, keys, causal)
        ids = torch.as_tensor(token_ids, dtype=torch.long).expand(rows, -1)
        axes = None if cache is None else cache.text_axes(places)
        past: AbstractContextManager[Any] = nullcontext(empty_cache())
        if cache is not None:
            past = cache_of_rows(subject, cache, patches or [()] * rows, laid_out=bridged or not cache)
        with past as entries:
            output = call_model(subject, ids, places, entries, plan, axes=axes, gradients=gradients)
        return logits_of(output, subject)

    @contextmanager
    def _hooked(self, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
        points = [self._points[name] for name in functions]
        try:
            for point, function in zip(points, functions.values(), strict=True):
                point.add_hook(function, level=HOOK_LEVEL)
            yield
        finally:
            for point in points:
                point.remove_hooks(level=HOOK_LEVEL)

    def _known(self, hooks: Sequence[str]) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(hooks))
        for name in names:
            if name not in self._points:
                near = difflib.get_close_matches(name, self.hooks, n=1, cutoff=0.0)
                raise UnsupportedError(f"{self._subject.name} has no hook {name!r}; did you mean {near[0]!r}?")
        return names

    def _editable(self, hooks: Sequence[str]) -> tuple[str, ...]:
        names = self._known(hooks)
        for name in names:
            if name.endswith(_READ_ONLY):
                other = name.replace(_READ_ONLY, "hook_attn_out")
                raise UnsupportedError(f"{name} can only be read; a change of {other} changes it by as much.")
        return names

    def _check_agrees(self, subject: Subject) -> None:
        """Compare a short pass with the subject's own: what the bridge gets wrong must not reach a result."""
        ids = [number % subject.config.vocab_size for number in range(1, 9)]
        own = prefill(subject, ids).logits
        difference = float((own - self._call(ids, None, 1)[0]).norm() / own.norm())
        tolerance = _TOLERANCE.get(subject.dtype, _HALF_TOLERANCE)
        if not difference <= tolerance:
            raise NumericsError(
                f"The TransformerLens bridge of {subject.name} differs from the model by {difference:.1e} of the norm "
                f"of its logits, more than the {tolerance:.0e} that another attention kernel may make."
            )


def components(subject: Subject) -> Components:
    """The components of `subject`, made at the first call and kept as long as the subject is."""
    made = _MADE.get(subject)
    if made is None:
        made = _MADE[subject] = Components(subject)
    return made


_MADE: weakref.WeakKeyDictionary[Subject, Components] = weakref.WeakKeyDictionary()


def _next_position(cache: KVCache | None) -> int:
    return int(cache.positions.max()) + 1 if cache is not None and len(cache) else 0


def _check_positions(edit: ActivationEdit, places: range) -> None:
    outside = [position for position in edit.positions or () if position not in places]
    if outside:
        raise UnsupportedError(
            f"The edit of {edit.hook} is at position {outside[0]}; this pass runs {places.start} to {places.stop - 1}."
        )


def _check_acted(acted: Mapping[ActivationEdit, Tensor]) -> None:
    """Refuse edits that changed nothing; asked once after a pass, so that no device waits within it."""
    for edit, changed in acted.items():
        if not bool(changed):
            raise NoEffectError(
                f"The edit of {edit.hook} changes nothing: what it writes is what stands there; choose another place, "
                "or declare no_op."
            )


def _editor(
    edits: Sequence[tuple[int, ActivationEdit]], axis: int, start: int, acted: dict[ActivationEdit, Tensor]
) -> Callable[..., Tensor]:
    """What makes all edits of one activation, each in its row; TransformerLens calls it with its hook.

    Of edits that must act, `acted` is told whether they did, in any row.
    """

    def change(activation: Tensor, *, hook: Any = None) -> Tensor:  # noqa: ARG001
        changed = activation.clone()
        rows = changed.movedim(axis, 1)
        for number, edit in edits:
            places: Any = slice(None)
            if edit.positions is not None:
                places = torch.as_tensor(edit.positions, device=activation.device) - start
            old = rows[number, places]
            new = edit.change(old.clone())
            if new.shape != old.shape:
                raise UnsupportedError(
                    f"The change of {edit.hook} turns a shape of {list(old.shape)} into {list(new.shape)}."
                )
            if not edit.no_op:
                changes = (new.to(old) != old).any()
                acted[edit] = changes | acted[edit] if edit in acted else changes
            rows[number, places] = new.to(old)
        return changed

    return change
