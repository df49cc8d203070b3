"""Check how messages become tokens: render sample conversations with tools and thinking, report how the chat template
changes them, and show one with its control tokens and its mask. Any key can be set, as in --task.template chat.

Exit codes: 0 a run may begin like this, 1 it must not, 2 the config cannot be used.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from titan_rl.config import toml as config_file
from titan_rl.config.sections import Config
from titan_rl.config.toml import ConfigError
from titan_rl.preflight.checks.model import policy_tokenizer
from titan_rl.preflight.checks.task import check_template_keys, inspected
from titan_rl.preflight.load import read
from titan_rl.preflight.pretrained import FetchFailed, with_models
from titan_rl.preflight.refusal import printable, refuse, refusing
from titan_rl.preflight.shapes import usable_shape
from titan_rl.text.inspection import SAMPLE, Finding, difference, sample_turns, verdict
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.tools.inspect.token_view import shown
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.program import command_of, enter

SOUND, UNSOUND = 0, 1


@refusing
def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if {"--help", "-h"} & set(argv):
        print(f"usage: {command_of('lint')} --config NAME|FILE [--section.key VALUE ...]\n\n{(__doc__ or '').strip()}")
        return SOUND
    arguments = read(argv)
    try:
        config = with_models(config_file.load(config_file.find(arguments.config), arguments.overrides))
    except (ConfigError, FetchFailed) as error:
        refuse(arguments.config, [*arguments.problems, *getattr(error, "problems", [str(error)])])
    shape, unusable = usable_shape(config)
    problems = [*arguments.problems, *unusable, *check_template_keys(config)]
    tokenizer = policy_tokenizer(config)
    if shape is None or tokenizer is None or problems:
        missing = f"model.hf_assets_path: expected a tokenizer in {config.model.hf_assets_path!r}, found none"
        refuse(arguments.config, problems or [missing])
    findings = list(findings_of(config, shape, tokenizer))
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for line in report(findings):
        console.print(line)
    if config.task.template == "chat" and not any(finding.check == "one question" for finding in findings):
        console.print(Text.assemble(("\nverdict ", "bold"), verdict(findings)))
        console.print(Text.assemble(("calls ", "bold"), tokenizer.chat.call_format))
        console.print(shown("One conversation", tokenizer, sample_turns(tokenizer)))
    return UNSOUND if any(finding.refuses for finding in findings) else SOUND


def findings_of(config: Config, shape: ModelShape, tokenizer: TextTokenizer) -> Iterator[Finding]:
    """Yield a finding for each check of messages and tokens in a run of this config."""
    size, rows = tokenizer.size, shape.vocab_size
    large = f"expected an embedding of at least {size} rows, one per token, found {rows} in config.json"
    yield Finding("vocabulary", large if size > rows else "", refuses=size > rows)
    if config.task.template == "plain":
        yield Finding("chat template", 'is not used: task.template = "plain"')
        return
    if config.task.chat_template:
        yield from _compared_with_own(tokenizer)
    yield from inspected(config, tokenizer)


def _compared_with_own(tokenizer: TextTokenizer) -> Iterator[Finding]:
    """Compare task.chat_template with the folder's template, which the model was trained with."""
    original = TextTokenizer.load(tokenizer.folder, replace(tokenizer.chat_settings, template=""))
    try:
        expected, changed_prompt = original.chat.prompt(SAMPLE), tokenizer.chat.prompt(SAMPLE)
    except Exception:  # a template may raise anything; inspect_template reports it
        return
    changed = difference(tokenizer, expected, changed_prompt)
    yield Finding("task.chat_template", f"differs from the one of {tokenizer.folder}: {changed}" if changed else "")


def report(findings: Sequence[Finding]) -> list[Text]:
    """Return a line per finding: the check, and the problem or remark if there is one."""
    width = max(len(finding.check) for finding in findings)
    return [
        Text.assemble(
            ("✗ ", "bold red") if finding.refuses else ("! ", "yellow") if finding.detail else ("✓ ", "green"),
            f"{finding.check:<{width}}  {printable(finding.detail)}".rstrip(),
        )
        for finding in findings
    ]


if __name__ == "__main__":
    enter(main)
