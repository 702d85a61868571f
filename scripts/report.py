"""Write the report of a run as one HTML file that opens anywhere, and its model card. What is in them: docs/report.md.

    python scripts/report.py RUN

Training writes both when it ends, and scripts/evaluate.py when it has measured; this also for a run that still goes
on. A card that a person wrote or changed stays as it is.
"""

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder; RUN/report.html and RUN/README.md")
    options = parser.parse_args()
    try:
        for line in renew(options.run):
            print(line)
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is not installed: pip install 'unet-attn[train]'", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def renew(run: Path) -> list[str]:
    """Write what tells of a run from all that is known of it by now, and return a line for each file.

    There is no card without a pipeline, as before the first checkpoint. Raises ValueError for what is no run or holds a
    damaged file, OSError if a file cannot be read or written.
    """
    from unet_attn.model_card import CARD, INDEX, write_model_card
    from unet_attn.report import write_report

    lines = [str(write_report(run))]
    if (run / INDEX).is_file():
        card = write_model_card(run)
        lines.append(f"{run / CARD} stays as somebody wrote it" if card is None else str(card))
    return lines


if __name__ == "__main__":
    sys.exit(main())
