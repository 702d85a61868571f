"""Write the report of a run as one HTML file that opens anywhere. What is in it: docs/report.md.

    python scripts/report.py RUN

Training writes it when it ends; this writes it again, after scripts/evaluate.py or for a run that still goes on.
"""

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder; RUN/report.html is written")
    options = parser.parse_args()
    try:
        from unet_attn.report import write_report

        print(write_report(options.run))
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is not installed: pip install 'unet-attn[train]'", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
