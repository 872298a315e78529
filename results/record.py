"""Write the record of a committed replication anew: exhibits and verdicts from the Grams, figures, record, copies.

python results/record.py FOLDER [KEY]    sign with the ed25519 key in the PEM file KEY

Then run `python results/table.py --write`, and put number and public key into docs/replication.md.
"""

import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path

import figures

from scoregram.studies.grpo_rank import PAPER_ID
from scoregram.studies.grpo_rank.evidence import assessment, write_evidence
from scoregram.studies.grpo_rank.presets import read_setting
from scoregram.studies.grpo_rank.verdicts import SHIPPED
from scoregram.studies.record import write_record


def write(folder: Path, key_file: Path | None) -> Path:
    """Everything in the folder that follows from its runs; returns the path of the record."""
    setting = read_setting(folder)
    _, verdicts = write_evidence(folder)
    figures.draw_all(folder)
    path = write_record(
        folder,
        about=PAPER_ID,
        config=setting,
        seeds=range(setting["seeds"]),
        created=datetime.now(UTC).date(),
        assessment=assessment(verdicts),
        key_file=key_file,
    )
    shutil.copyfile(path, SHIPPED / f"{folder.name}.json")
    return path


if __name__ == "__main__":
    print(write(Path(sys.argv[1]).resolve(), Path(sys.argv[2]) if len(sys.argv) > 2 else None))
