"""`python -m titan_rl` is `python -m titan_rl.run`."""

from titan_rl.run import entry

if __name__ == "__main__":
    entry()
