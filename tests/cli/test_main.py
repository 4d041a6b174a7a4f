"""Commands and options: what is refused, how, and where values come from."""

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import jax
import pytest
import yaml

from mtp_jax.cli import main
from mtp_jax.cli.options import Parser, add_sampling, add_speculation
from mtp_jax.cli.start import compile_cache_folder, use_compile_cache
from mtp_jax.core.config import SamplingParams, SpeculativeConfig


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence on stderr with which a command line is refused."""
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("mtp-jax: ")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "COMMAND"),
        (("serve",), "'serve'"),
        (("bench",), "'bench'"),
        (("bench", "prefill"), "'bench'"),
        (("generate",), "prompt"),
        (("generate", "a", "b"), "b"),
        (("generate", "a", "--temprature", "1"), "--temprature"),
        (("generate", "a", "--temp", "1"), "--temp"),
        (("generate", "a", "--top-k", "many"), "--top-k"),
        (("generate", "a", "--policy", "best"), "--policy"),
        (("generate", "a", "--disable-below-acceptance", "2"), "disable_below_acceptance is 2.0"),
        (("generate", "a", "--acceptance-window", "9"), "acceptance_window is 9"),
        (("generate", "a", "--method", "none", "--acceptance-window", "9"), "--acceptance-window"),
        (("generate", "a", "--mesh", "data"), "--mesh"),
        (("generate", "a", "--repeats", "0"), "--repeats"),
        (("generate", "a", "--method", "none", "--compare"), "--compare"),
        (("generate", "a", "--method", "none", "--num-speculative-tokens", "2"), "--num-speculative-tokens"),
        (("generate", "a", "--method", "none", "--num-speculative-tokens", "3"), "--num-speculative-tokens is 3, and"),
        (("generate", "a", "--method", "none", "--acceptance=match"), "--acceptance"),
        (("generate", "a", "--method", "none", "--policy", "fixed"), "--policy"),
        (("generate", "a", "--method=none", "--draft-sampling=greedy"), "--draft-sampling"),
        (("bench", "decode", "--method", "none"), "--method"),
        (("bench", "decode", "--batch-sizes", "0"), "--batch-sizes"),
        (("bench", "decode", "--repeats", "0"), "--repeats"),
        (("bench", "decode", "--prompts", "no-such-file"), "no-such-file"),
        (("generate", "a", "--config", "no-such-file"), "no-such-file"),
    ],
)
def test_a_bad_command_line_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: str
) -> None:
    assert named in refusal(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--temperature", "nan"), "temperature"),
        (("--top-k", "-2"), "top_k"),
        (("--top-p", "0"), "top_p"),
        (("--seed", "-1"), "seed"),
        (("--max-tokens", "0"), "max_tokens"),
        (("--logprobs", "21"), "logprobs is 21"),
        (("--min-p", "2"), "min_p is 2.0"),
        (("--min-tokens", "200"), "min_tokens is 200"),
        (("--presence-penalty", "3"), "presence_penalty is 3.0"),
        (("--frequency-penalty", "3"), "frequency_penalty is 3.0"),
        (("--repetition-penalty", "0"), "repetition_penalty is 0.0"),
        (("--stop", ""), "stop"),
        (("--num-speculative-tokens", "8"), "num_speculative_tokens"),
        (("--block-size", "0"), "block_size"),
        (("--max-model-len", "3"), "prompt"),
        (("--max-model-len", "5000"), "max_model_len"),
        (("--num-kv-blocks", "1"), "num_kv_blocks"),
        (("--num-kv-blocks", str(2**40)), "num_kv_blocks"),
        (("--mesh", "data=16"), "mesh"),
        (("--attention-backend", "fast"), "backend"),
        (("--dtype", "int4"), "dtype"),
    ],
)
def test_what_the_engine_would_refuse_is_refused_before_anything_compiles(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], named: str
) -> None:
    monkeypatch.setattr("mtp_jax.cli.generate.start", lambda *_: pytest.fail("the engine was started"))
    assert named in refusal(capsys, "generate", "abc", *arguments)


def test_an_unknown_model_is_named_with_those_there_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert "'no-such-model'" in refusal(capsys, "generate", "abc", "--model", "no-such-model")


def test_our_own_faults_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtp_jax.cli.doctor.run", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


def test_a_warning_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtp_jax.cli.doctor.run", lambda _: warnings.warn("drafting 2 tokens a step", stacklevel=1))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["doctor"]) == 0
    assert capsys.readouterr().err == "mtp-jax: warning: drafting 2 tokens a step\n"


def resolved(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main([*arguments, "--print-config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_a_config_file_fills_in_and_the_command_line_wins(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(
        "temperature: 0.5\nmax-tokens: 9\nstop: [x, '-y']\nignore_eos: true\ncompile_cache: false\nmesh: {data: 2}\n"
    )
    options = resolved(capsys, "generate", "--config", str(file), "--max-tokens", "7", "--compile-cache")
    expected = {"temperature": 0.5, "max_tokens": 7, "stop": ["x", "-y"], "ignore_eos": True, "compile_cache": True}
    assert options.items() >= {**expected, "mesh": {"data": 2}}.items()
    assert resolved(capsys, "generate", "--config", str(file), "--stop=z")["stop"] == ["z"]


def test_what_print_config_prints_is_a_config_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = resolved(
        capsys, "generate", "--top-k", "5", "--stop", "x", "--stop", "y", "--compare", "--mesh", "model=2"
    )
    for name, text in (("options.yaml", yaml.safe_dump(options)), ("options.json", json.dumps(options))):
        (tmp_path / name).write_text(text)
        assert resolved(capsys, "generate", "--config", str(tmp_path / name)) == options


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("temprature: 1", "'temprature'"),
        ("verbose: true", "'verbose'"),
        ("temperature: warm", "--temperature"),
        ("temperature: true", "--temperature"),
        ("- temperature", "must map"),
        ("{", "neither YAML nor JSON"),
    ],
)
def test_a_bad_config_file_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, named: str
) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(text)
    assert named in refusal(capsys, "generate", "a", "--config", str(file))


def test_help_and_version_do_not_load_jax() -> None:
    program = (
        "import contextlib, sys; from mtp_jax.cli import main\n"
        "for argument in ('--help', '--version'):\n"
        "    with contextlib.suppress(SystemExit): main([argument])\n"
        "sys.exit('jax' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "generate" in result.stdout


@pytest.fixture
def cache_settings() -> Iterator[None]:
    """Puts jax's own settings back after a test that changes them."""
    names = (
        "jax_compilation_cache_dir",
        "jax_enable_compilation_cache",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("cache_settings")
def test_compiled_programs_are_kept_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", "/chosen/through/jax")
    use_compile_cache(True)
    assert compile_cache_folder() == Path("/chosen/through/jax")
    jax.config.update("jax_compilation_cache_dir", None)
    use_compile_cache(True)
    assert compile_cache_folder() == tmp_path / "mtp_jax" / "xla"
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "mtp_jax" / "xla")
    use_compile_cache(False)
    assert not jax.config.values["jax_enable_compilation_cache"]


def test_doctor_names_devices_and_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "attention backend by default" in printed.out
    assert printed.out.count("cpu, cpu") == 8


def test_every_field_of_drafting_and_sampling_has_an_option_or_a_reason() -> None:
    reasons = {
        "logprobs": "an option of generate alone",
        "n": "generate writes one text",
        "prompt_logprobs": "generate lists the tokens it writes",
        "bad_words": "of text, which only the library reads",
        "thinking_token_ids": "of a request, which only the library makes",
        "model": "called --speculative-model, beside --model",
    }
    parser = Parser(prog="mtp-jax")
    add_speculation(parser, policies=("goodput", "fixed", "schedule"))
    add_sampling(parser, ignore_eos=False)
    options = set(vars(parser.parse_args([])))
    named = {field.name for kind in (SpeculativeConfig, SamplingParams) for field in fields(kind)}
    assert named - options == reasons.keys()


def test_pairs_are_read_as_mappings(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--policy", "schedule", "--draft-len-schedule", "4=3,16=1", "--logit-bias", "7=-1.5"]
    assert main(["generate", "x", *arguments, "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["draft_len_schedule"] == {4: 3, 16: 1}
    assert printed["logit_bias"] == {7: -1.5}
    assert main(["generate", "x", "--draft-len-schedule", "4"]) == 2
    assert "invalid draft-len-schedule value: '4'" in capsys.readouterr().err
