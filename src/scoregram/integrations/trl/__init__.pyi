from .attachment import Attachment as Attachment
from .attachment import attach as attach
from .recommendations import replayed_recommendations as replayed_recommendations
from .support import NEWEST_TESTED as NEWEST_TESTED
from .support import OLDEST_TESTED as OLDEST_TESTED
