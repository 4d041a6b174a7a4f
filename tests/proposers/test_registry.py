"""Which proposer a method means, once the checkpoint is known."""

import warnings
from dataclasses import replace

import pytest

from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.proposers.dynamic_tree import DynamicTree
from mtp_jax.proposers.eagle3 import eagle3
from mtp_jax.proposers.mtp import mtp_eagle, mtp_vanilla
from mtp_jax.proposers.none import NO_DRAFT
from mtp_jax.proposers.registry import PROPOSERS, check_method, method_names, resolve_method
from mtp_jax.testing.toy_family import ToyFamily
from tests.models.tiny_eagle3 import tiny_eagle3


def spec(method: str | None = "mtp", kmax: int = 5) -> SpeculativeConfig:
    return SpeculativeConfig(method=method, num_speculative_tokens=kmax)


def test_b13_one_layer_is_applied_again_and_again() -> None:
    assert resolve_method(spec(), ToyFamily(num_mtp_layers=1)) == ("mtp_eagle", 5)


@pytest.mark.parametrize("num_layers", [2, 3])
def test_b13_more_layers_draft_one_position_each(num_layers: int) -> None:
    with pytest.warns(UserWarning, match=rf"num_speculative_tokens=5 .* {num_layers} MTP layers"):
        assert resolve_method(spec(), ToyFamily(num_mtp_layers=num_layers)) == ("mtp_vanilla", num_layers)


def test_b13_what_fits_the_layers_is_not_warned_about() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_method(spec(kmax=3), ToyFamily(num_mtp_layers=3)) == ("mtp_vanilla", 3)
        assert resolve_method(spec(kmax=2), ToyFamily(num_mtp_layers=3)) == ("mtp_vanilla", 2)
        assert resolve_method(spec("mtp_eagle"), ToyFamily(num_mtp_layers=3)) == ("mtp_eagle", 5)


@pytest.mark.parametrize("method", ["mtp", "mtp_eagle", "mtp_vanilla"])
def test_b13_no_layer_is_an_error_and_never_one_layer(method: str) -> None:
    with pytest.raises(ConfigError, match="needs MTP layers and this toy checkpoint has none"):
        resolve_method(spec(method), ToyFamily(num_mtp_layers=0))


def test_plain_decoding_needs_no_layer() -> None:
    assert resolve_method(spec(None, 0), ToyFamily(num_mtp_layers=0)) == (None, 0)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_the_table_builds_what_was_resolved(num_layers: int) -> None:
    family = ToyFamily(num_mtp_layers=num_layers)
    assert PROPOSERS["mtp_eagle"].build(family, spec()) == mtp_eagle("coupled")
    assert PROPOSERS["mtp_vanilla"].build(family, spec()) == mtp_vanilla(num_layers, "coupled")
    assert PROPOSERS[None].build(family, spec()) == NO_DRAFT


def test_a_method_with_a_drafter_needs_one() -> None:
    with pytest.raises(ConfigError, match="method 'eagle3' needs a drafter; give its checkpoint's folder as model"):
        resolve_method(spec("eagle3"), ToyFamily())
    assert resolve_method(spec("eagle3"), tiny_eagle3()) == ("eagle3", 5)
    assert PROPOSERS["eagle3"].build(tiny_eagle3(), spec("eagle3")) == eagle3("coupled")
    with pytest.raises(ConfigError, match="needs MTP layers and this llama checkpoint has none"):
        resolve_method(spec("mtp"), tiny_eagle3())


def test_a_tree_grows_over_the_drafter_where_there_is_one() -> None:
    tree = SpeculativeConfig(method="dynamic_tree", num_speculative_tokens=3, tree_topk=2, tree_nodes=5)
    assert resolve_method(tree, tiny_eagle3()) == ("dynamic_tree", 3)
    proposer = PROPOSERS["dynamic_tree"].build(tiny_eagle3(), tree)
    assert isinstance(proposer, DynamicTree)
    assert proposer.base == eagle3("coupled")
    with pytest.raises(ConfigError, match="tree_topk is 17; there are 16 tokens to draft"):
        resolve_method(replace(tree, num_speculative_tokens=1, tree_topk=17, tree_nodes=17), tiny_eagle3())
    with pytest.raises(ConfigError, match="draft_vocab_size is 8, and the drafter has a vocabulary of its own"):
        resolve_method(replace(tree, draft_vocab_size=8), tiny_eagle3())


def test_a_tree_over_the_first_of_several_layers_says_so() -> None:
    tree = SpeculativeConfig(method="dynamic_tree")
    with pytest.warns(UserWarning, match="drafts with the first of the checkpoint's 2 MTP layers.* the others are not"):
        assert resolve_method(tree, ToyFamily(num_mtp_layers=2)) == ("dynamic_tree", 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve_method(tree, ToyFamily(num_mtp_layers=1))


@pytest.mark.parametrize("method", ["mtp", "mtp_eagle", "ngram"])
def test_a_drafter_is_refused_by_methods_that_take_none(method: str) -> None:
    asked = SpeculativeConfig(method=method, model="drafter")
    with pytest.raises(ConfigError, match=f"model is 'drafter', which method '{method}' has no use for; .*'eagle3'"):
        check_method(asked)


def test_an_unknown_method_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="method is 'magic'; it must be None or one of 'mtp', 'mtp_eagle', 'mtp_van"):
        resolve_method(spec("magic"), ToyFamily())


def test_every_name_is_in_the_table_or_resolves_to_one_that_is() -> None:
    for method in method_names():
        family = tiny_eagle3() if method in ("eagle3", "dynamic_tree") else ToyFamily(num_mtp_layers=2)
        resolved, _ = resolve_method(spec(method, 1), family)
        assert resolved in PROPOSERS
