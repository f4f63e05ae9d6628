"""Facts read straight out of the scheduler processes' memory: also from a server that hangs."""

from sgdiag.sources.objects.observation import Observation, encodable
from sgdiag.sources.objects.scheduler import SchedulerProcess, source_error
from sgdiag.sources.objects.source import ObjectsSource

__all__ = ["ObjectsSource", "Observation", "SchedulerProcess", "encodable", "source_error"]
