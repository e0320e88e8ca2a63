"""When the first audio came: what perf_analyzer measured and does not print.

    python first_response.py PROFILE_EXPORT_FILE

For a decoupled model perf_analyzer 2.50 prints latencies to the last response, though it says "the first".
"""

import json
import sys
from pathlib import Path

import numpy as np


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: first_response.py PROFILE_EXPORT_FILE")
    try:
        experiments = json.loads(Path(sys.argv[1]).read_text())["experiments"]
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")
    except (ValueError, KeyError, TypeError):
        sys.exit(f"error: {sys.argv[1]} is no file of perf_analyzer's --profile-export-file")
    for measured in experiments:
        setting, requests = measured["experiment"], measured["requests"]
        answered = [request for request in requests if request["response_timestamps"]]
        unanswered = len(requests) - len(answered)
        print(f"{setting['mode']} {setting['value']}: {len(requests)} requests, {unanswered} unanswered")
        for what, index in ("first", 0), ("last", -1):
            ms = [1e-6 * (request["response_timestamps"][index] - request["timestamp"]) for request in answered]
            if ms:
                percentiles = [f"p{p} {np.percentile(ms, p):.0f}" for p in (50, 90, 99)]
                print(f"{what} response, ms: average {np.mean(ms):.0f}, {', '.join(percentiles)}")


if __name__ == "__main__":
    main()
