"""What all contestants work on: two prompts of one model, and everything that is known of them before a sweep."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.sweep import run_patches
from kvprobe.errors import UnsupportedError

if TYPE_CHECKING:
    from kvprobe.engine.cache import KVCache
    from kvprobe.models.subject import Subject

_KEYS, _VALUES, _OUT = "k_proj", "v_proj", "o_proj"
# A margin is a difference of two logits, and patched prompts may round a little worse than those that were measured.
_TOLERATED_FLOORS = 4


@dataclass(frozen=True, eq=False)
class Projected:
    """What the attention layers of one prompt computed, by layer.

    Attributes:
        keys, values: outputs of the projections, before any rotation, `[1, position, kv_head * head_dim]`.
        heads: outputs of the heads, side by side, at the last token, `[1, 1, head * head_dim]`.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    heads: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Case:
    """A base and a donor prompt of equal length that share their first token only.

    Attributes:
        subject: the model.
        base_ids, donor_ids: token ids.
        base, donor: their caches.
        answers: the two tokens whose logits are compared.
        noise_floor: largest difference of an unpatched logit between ways of computing it, in logits.
    """

    subject: Subject
    base_ids: tuple[int, ...]
    donor_ids: tuple[int, ...]
    base: KVCache
    donor: KVCache
    answers: tuple[int, int]
    noise_floor: float

    @property
    def length(self) -> int:
        """Tokens of each prompt."""
        return len(self.base_ids)

    @property
    def tolerance(self) -> float:
        """By how much two ways of computing a margin may differ, in logits."""
        return _TOLERATED_FLOORS * self.noise_floor

    def margins(self, logits: Tensor) -> Tensor:
        """The difference of the two answers' logits, `[..., vocab]` to `[...]`."""
        old, new = self.answers
        return (logits[..., new] - logits[..., old]).detach().cpu().float()

    @cached_property
    def before(self) -> KVCache:
        """The base prompt's cache without the last token's entry."""
        return self.base.take(slice(0, self.length - 1))

    @cached_property
    def projected(self) -> tuple[Projected, Projected]:
        """What the attention layers computed in the base and in the donor prompt."""
        return project(self.subject, self.base_ids), project(self.subject, self.donor_ids)

    def suffix(self, number: int, length: int) -> tuple[int, ...]:
        """The `number`-th variant of the last `length` tokens, the last one of all left as it is."""
        made = random_tokens(self.subject, length - 1, seed=1000 + number)
        return (*made, self.base_ids[-1])


def make_case(subject: Subject, length: int) -> Case:
    """Two random prompts of `length` tokens; what they say has no influence on speed."""
    base_ids = random_tokens(subject, length, seed=0)
    donor_ids = (base_ids[0], *random_tokens(subject, length - 1, seed=1))
    base, donor = prefill(subject, base_ids), prefill(subject, donor_ids)
    first = int(base.logits.argmax())
    second = int(donor.logits.argmax())
    if second == first:
        second = int(donor.logits.topk(2).indices[1])
    floor = _noise_floor(subject, base_ids, base.logits, base.cache)
    return Case(subject, base_ids, donor_ids, base.cache, donor.cache, (first, second), floor)


def random_tokens(subject: Subject, count: int, *, seed: int) -> tuple[int, ...]:
    """`count` token ids without the special ones."""
    special = set(getattr(subject.tokenizer, "all_special_ids", ()) or (0, 1, 2))
    size = int(subject.config.vocab_size) if subject.tokenizer is None else len(subject.tokenizer)
    plain = [token for token in range(size) if token not in special]
    drawn = torch.randint(len(plain), (count,), generator=torch.Generator().manual_seed(seed))
    return tuple(plain[place] for place in drawn.tolist())


def twin_of(model: Any) -> Any:
    """A copy of the module tree that shares its weights, for a library that changes the modules it is given."""
    shared = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)


def attention_modules(subject: Subject, model: Any) -> list[Any]:
    """The attention of each layer.

    Raises:
        UnsupportedError: it has no projections of its own for keys, values and output.
    """
    modules = [layer.self_attn for layer in subject.architecture.decoder_layers(model)]
    lacking = [name for name in (_KEYS, _VALUES, _OUT) if not all(hasattr(module, name) for module in modules)]
    if lacking:
        raise UnsupportedError(
            f"The attention of {subject.name} has no {lacking[0]}, where this way of patching hooks."
        )
    return modules


@contextmanager
def hooked(
    outputs: Mapping[Any, Callable[[Tensor], Tensor | None]], inputs: Mapping[Any, Callable[[Tensor], Tensor | None]]
) -> Iterator[None]:
    """Within it, outputs and inputs of modules go through the functions given; None leaves them as they are."""

    def before(function: Callable[[Tensor], Tensor | None]) -> Callable[..., Any]:
        return lambda _module, given: None if (new := function(given[0])) is None else (new, *given[1:])

    def after(function: Callable[[Tensor], Tensor | None]) -> Callable[..., Any]:
        return lambda _module, _given, output: function(output)

    handles = []
    try:
        handles += [module.register_forward_hook(after(function)) for module, function in outputs.items()]
        handles += [module.register_forward_pre_hook(before(function)) for module, function in inputs.items()]
        yield
    finally:
        for handle in handles:
            handle.remove()


def project(subject: Subject, token_ids: Sequence[int]) -> Projected:
    """Run a prompt and keep what the attention layers compute."""
    keys: list[Tensor] = []
    values: list[Tensor] = []
    heads: list[Tensor] = []
    modules = attention_modules(subject, subject.model)
    outputs = {module.k_proj: keys.append for module in modules} | {module.v_proj: values.append for module in modules}
    inputs = {module.o_proj: lambda given: heads.append(given[:, -1:].clone()) for module in modules}
    with hooked(outputs, inputs), torch.no_grad():
        subject.model(torch.tensor([token_ids], device=subject.device), use_cache=False, logits_to_keep=1)
    return Projected(tuple(keys), tuple(values), tuple(heads))


def _noise_floor(subject: Subject, ids: Sequence[int], whole: Tensor, cache: KVCache) -> float:
    """Compare a prefill with one in two pieces, with the last token run on its cache, and with the eager kernel."""
    half = len(ids) // 2
    others = [
        forward(subject, ids[half:], prefill(subject, ids[:half]).cache).logits,
        run_patches(subject, ids, cache, [()])[0],
    ]
    eager = twin_of(subject.model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        output = eager(torch.tensor([list(ids)], device=subject.device), use_cache=False, logits_to_keep=1)
    others.append(output.logits[0, -1])
    return max(float((whole.cpu() - other.cpu()).abs().max()) for other in others)
