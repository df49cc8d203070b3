"""Sends an alert, a JSON object on standard input, to the http(s) address in TITAN_RL_ALERT by POST.

Exit codes: 0 the server answered with a status of 2xx, 1 anything else, with a line that does not name the address,
which may hold a secret.
"""

import os
import sys
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from titan_rl.environment import ALERT


def main() -> int:
    headers = {"Content-Type": "application/json", "User-Agent": "titan_rl"}
    request = Request(os.environ[ALERT], data=sys.stdin.buffer.read(), headers=headers, method="POST")
    try:
        urlopen(request).close()
    except HTTPError as error:
        print(f"the server answered with status {error.code}", file=sys.stderr)
    except URLError as error:
        print(f"the server was not reached: {getattr(error.reason, 'strerror', None) or error.reason}", file=sys.stderr)
    except (OSError, ValueError) as error:
        print(f"the server did not answer: {type(error).__name__}", file=sys.stderr)
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
