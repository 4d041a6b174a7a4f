"""`generate` and `--compare`: what goes to stdout, what to stderr, and what is said about the tokens."""

from pathlib import Path

import jax
import pytest

from mtp_jax import LLM, SamplingParams
from mtp_jax.cli import main
from mtp_jax.testing.toy_family import ToyFamily
from mtp_jax.text import load_tokenizer
from tests.cli.conftest import UseModel

PLAIN_ARGUMENTS = ("generate", "some text", "--max-tokens", "24")
ARGUMENTS = (*PLAIN_ARGUMENTS, "--num-speculative-tokens", "2")


def plain_text(family: ToyFamily, folder: Path, params: SamplingParams) -> str:
    """What plain decoding writes, by the library."""
    weights = family.init_weights(jax.random.key(0), None)
    # The command's own sizes, so that no other programs are compiled.
    llm = LLM.from_weights(
        family, weights, tokenizer=load_tokenizer(folder), max_num_seqs=1, max_model_len=48, prefill_chunk=16
    )
    return llm.generate("some text", params, use_tqdm=False)[0].outputs[0].text


@pytest.mark.parametrize("policy", ["goodput", "fixed"])
def test_stdout_is_the_text_and_nothing_else(
    capsys: pytest.CaptureFixture[str], use_model: UseModel, tmp_path: Path, policy: str
) -> None:
    family = use_model(draft_hit_percent=60)
    assert main([*ARGUMENTS, "--policy", policy]) == 0
    printed = capsys.readouterr()
    expected = plain_text(family, tmp_path, SamplingParams(temperature=0, max_tokens=24))
    assert printed.out == f"{expected}\n"
    assert len(expected) == 24
    assert printed.err.startswith("some text")
    assert "24 tokens in" in printed.err
    assert "draft lengths used:" in printed.err
    assert ("drafts kept, by position:" in printed.err) or policy == "goodput"  # which may choose none
    assert "compiling" not in printed.err  # a progress bar is for terminals


def test_stop_and_seed_reach_the_engine(
    capsys: pytest.CaptureFixture[str], use_model: UseModel, tmp_path: Path
) -> None:
    family = use_model()
    params = SamplingParams(temperature=0.7, top_k=9, top_p=0.9, seed=3, max_tokens=24)
    whole = plain_text(family, tmp_path, params)
    stop = whole[10:12]
    sampling = ("--temperature", "0.7", "--top-k", "9", "--top-p", "0.9", "--seed", "3", "--stop", stop)
    assert main([*ARGUMENTS, *sampling]) == 0
    assert capsys.readouterr().out == f"{whole[: whole.index(stop)]}\n"


def test_log_probabilities_are_listed_after_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    sampling = ("--temperature", "0.7", "--seed", "3", "--logprobs", "2", "--policy", "fixed")
    assert main([*ARGUMENTS, *sampling]) == 0
    text, listing = capsys.readouterr().out.split("\n\n")
    head, *lines = listing.splitlines()
    assert head.split() == ["token", "logprob", "rank", "likeliest"]
    assert "".join(line[1] for line in lines) == text  # 'a': one letter a token
    for line in lines:
        token, logprob, rank, *likeliest = line.replace("' '", "'_'").split()
        (first, best), (second, next_best) = likeliest[:2], likeliest[2:]
        assert 0 >= float(best) >= float(next_best)
        if int(rank) <= 2:
            assert (token, logprob) == ((first, best), (second, next_best))[int(rank) - 1]
        else:
            assert float(logprob) <= float(next_best)


def test_without_drafts_it_decodes_plainly(
    capsys: pytest.CaptureFixture[str], use_model: UseModel, tmp_path: Path
) -> None:
    family = use_model(num_mtp_layers=0)
    assert main([*PLAIN_ARGUMENTS, "--method", "none"]) == 0
    printed = capsys.readouterr()
    assert printed.out.rstrip("\n") == plain_text(family, tmp_path, SamplingParams(temperature=0, max_tokens=24))
    assert "draft lengths used:       0 in 23 steps" in printed.err


def test_a_model_that_cannot_draft_or_read_text_is_refused(
    capsys: pytest.CaptureFixture[str], use_model: UseModel
) -> None:
    use_model(num_mtp_layers=0)
    assert main(ARGUMENTS) == 2
    assert "MTP layers" in capsys.readouterr().err
    use_model(has_tokenizer=False)
    assert main(ARGUMENTS) == 2
    assert "tokenizer" in capsys.readouterr().err


def test_compare_prints_both_speeds_and_that_the_tokens_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--policy", "fixed", "--compare", "--repeats", "2"]) == 0
    text, report = capsys.readouterr().out.split("\n\n")
    assert len(text) == 24
    lines = report.splitlines()
    assert lines[0].split() == ["tokens/s", "ms/step", "tokens/step"]
    plain, drafting = ([float(figure) for figure in line.split()[2:]] for line in lines[1:3])
    assert plain[2] == 1.0
    assert drafting[2] > 1.0
    ratio = float(lines[3].split()[0])
    assert ratio == pytest.approx(drafting[0] / plain[0], abs=0.006)  # it is printed to two digits
    assert lines[-1] == "The tokens are equal: all 24, in every round."


def test_compare_says_where_tokens_differ_and_still_ends_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, use_model: UseModel
) -> None:
    """A planted fault: plain decoding runs on other weights."""
    from mtp_jax.cli import generate

    start = generate.start

    def start_with_fault(model, speculative, settings, label):  # type: ignore[no-untyped-def]
        llm = start(model, speculative, settings, label)
        if speculative is None:
            weights = llm.engine.launcher.weights
            llm.engine.launcher.weights = {**weights, "salt": weights["salt"] + 1}
        return llm

    monkeypatch.setattr(generate, "start", start_with_fault)
    assert main([*ARGUMENTS, "--compare", "--repeats", "1"]) == 0
    sentence = capsys.readouterr().out.splitlines()[-1]
    assert sentence.startswith("The tokens are NOT equal: at output position 0 drafting gave token ")
    assert "its best token led the second by" in sentence


def test_a_mesh_of_two_data_shards_writes_too(capsys: pytest.CaptureFixture[str], use_model: UseModel) -> None:
    use_model(vocab_size=30)
    command = ["generate", "ab", "--max-tokens", "4", "--num-speculative-tokens", "1", "--policy", "fixed"]
    assert main([*command, "--mesh", "data=2"]) == 0
    printed = capsys.readouterr()
    assert "4 tokens in" in printed.err
    assert "tokens a step" in printed.err


@pytest.mark.parametrize("command", [["generate", "ab", "--compare"], ["bench", "decode"], ["bench", "acceptance"]])
def test_what_drives_one_scheduler_refuses_several(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--mesh", "data=2"]) == 2
    assert "drives one data shard; --mesh has data=2." in capsys.readouterr().err
