"""What self-distillation starts from: prompts of every kind, the same each time, and none that evaluation knows."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from mtp_jax.core.errors import ConfigError
from mtp_jax.models.registry import family_from_config
from mtp_jax.train.prompts import TEMPERATURES, Foreign, beginnings, lines
from mtp_jax.train.texts import tokens_in
from tests.train.tiny import TINY

FUNCTION = '''def area_of(width, height):
    """Return the area of a rectangle of this width and height."""
    return width * height
'''
PROSE = "\n\n".join(
    f"Paragraph {n} says that rivers carry water and sand and fine gravel from hills to plains." for n in range(40)
)
DOCUMENTS = [
    *({"name": f"code{n}", "kind": "code", "text": FUNCTION.replace("area", f"area{n}")} for n in range(40)),
    *({"name": f"text{n}", "kind": "docs", "text": PROSE.replace("rivers", f"rivers{n}")} for n in range(8)),
]


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def test_prompts_are_of_every_kind_and_the_same_each_time(words: Tokenizer) -> None:
    made = lines(DOCUMENTS, words, Foreign([]), 60, (192, 32))
    assert made == lines(DOCUMENTS[::-1], words, Foreign([]), 60, (192, 32))
    prompts = [line["body"]["prompt"] for line in made]
    assert len(set(prompts)) == 60
    assert sum(prompt.rstrip().endswith('"""') for prompt in prompts) > 5
    assert sum("<|im_start|>assistant" in prompt for prompt in prompts) > 20
    assert [line["body"]["temperature"] for line in made[:5]] == list(TEMPERATURES)
    assert all(line["body"]["return_token_ids"] and line["body"]["max_tokens"] == 32 for line in made)


def test_nothing_shares_a_run_of_words_with_what_is_evaluated(words: Tokenizer) -> None:
    judged = Foreign(["... Return the AREA of a rectangle, of this width and height!"])
    assert judged.shares_with("It is: return the area of a rectangle of this width")
    assert not judged.shares_with("return the area of a rectangle of that width")
    made = lines(DOCUMENTS, words, judged, 20, (192, 32))
    assert not any("rectangle" in line["body"]["prompt"] for line in made)
    texts = list(beginnings(DOCUMENTS, words, judged, 10_000, 50))
    assert len(texts) == 8
    assert all(len(ids) == 50 for ids in texts)


def test_too_few_documents_are_an_error(words: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"the documents give \d+ prompts; 900 were asked for"):
        lines(DOCUMENTS[:3], words, Foreign([]), 900, (192, 32))


def test_results_of_run_batch_are_read_token_for_token(tmp_path: Path) -> None:
    family = family_from_config({**TINY, "eos_token_id": 7})
    file = tmp_path / "results.jsonl"

    def result(*choices: dict[str, list[int]]) -> str:
        return json.dumps({"custom_id": "a", "response": {"status_code": 200, "body": {"choices": choices}}}) + "\n"

    refused = json.dumps({"custom_id": "b", "response": {"status_code": 400, "body": {"error": {}}}}) + "\n"
    ended, cut = ({"prompt_token_ids": [1, 2], "token_ids": ids} for ids in ([3, 7], [4, 5]))
    file.write_text(result(ended, cut) + refused)
    assert np.array_equal(tokens_in(file, family, None), [1, 2, 3, 7, 1, 2, 4, 5, 7])
    file.write_text(result(ended) + result({"token_ids": [3]}))
    with pytest.raises(ConfigError, match="line 2, is no result of run-batch"):
        tokens_in(file, family, None)
    file.write_text(refused)
    with pytest.raises(ConfigError, match="has no sample in it"):
        tokens_in(file, family, None)
