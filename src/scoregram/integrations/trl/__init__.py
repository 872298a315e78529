"""One line before `trainer.train()`: the Gram of every measured step of a TRL trainer, and all that follows from it.

TRL itself is imported where it is used. `docs/trl.md` says what is measured and how far it can be trusted.
"""

from scoregram.integrations.trl.attachment import Attachment as Attachment
from scoregram.integrations.trl.attachment import attach as attach
from scoregram.integrations.trl.names import NEWEST_TESTED as NEWEST_TESTED
from scoregram.integrations.trl.names import OLDEST_TESTED as OLDEST_TESTED
