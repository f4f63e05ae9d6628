"""A session on disk: what the screens showed, frame by frame."""

from sgdiag.session.recording.lines import FRAMES_PER_MEMBER, RECORDING_SCHEMA, Excerpt, Header, Report
from sgdiag.session.recording.player import ReplayFeed
from sgdiag.session.recording.reader import (
    Index,
    is_recording,
    read_frame,
    read_frames,
    read_header,
    read_index,
)
from sgdiag.session.recording.writer import Recorder

__all__ = [
    "FRAMES_PER_MEMBER",
    "RECORDING_SCHEMA",
    "Excerpt",
    "Header",
    "Index",
    "Recorder",
    "ReplayFeed",
    "Report",
    "is_recording",
    "read_frame",
    "read_frames",
    "read_header",
    "read_index",
]
