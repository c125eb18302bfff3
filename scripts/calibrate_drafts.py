"""Measure the calibrated heads that come with the library: calibrate_drafts.py PAIR...; --own for a target's own heads.

Each replaces the entry of the same weights in mlx_specprefill/selection/shipped_heads.json.
"""

from __future__ import annotations

import argparse
import json
import math

from mlx_specprefill import ScoringConfig, SelectionConfig, load_pair
from mlx_specprefill.calibration.finding_heads import find_heads
from mlx_specprefill.selection.heads import SHIPPED_HEADS, fingerprint
from mlx_specprefill_server.pairs import find_pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", nargs="+", metavar="PAIR", help="a name in models/pairs.toml")
    parser.add_argument("--own", action="store_true", help="the heads of the target, for a start without a draft")
    options = parser.parse_args()
    for name in options.pairs:
        pair = find_pair(name)
        where = pair.target if options.own or pair.draft in (None, "self") else pair.draft
        loaded = load_pair(where)
        found = find_heads(loaded.target, loaded.tokenizer, ScoringConfig(), SelectionConfig(), limit_s=math.inf)
        known = json.loads(SHIPPED_HEADS.read_text(encoding="utf-8"))
        known[fingerprint(loaded.target)] = {"pair": name, **found.to_dict()}
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in known.items())
        SHIPPED_HEADS.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        print(name, found.to_dict(), flush=True)


if __name__ == "__main__":
    main()
