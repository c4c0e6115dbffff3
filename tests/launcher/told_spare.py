"""In the place of launcher/spare.py, without torch: says what it is told and as what it was started, and ends."""

import json
import sys

if __name__ == "__main__":
    line = sys.stdin.readline()
    print(f"{sys.argv[1]} as rank {json.loads(line)['RANK'] if line else 'none'}", flush=True)
