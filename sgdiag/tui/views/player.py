"""The line below a recording: how far it is, at what pace, and what its maker had to say."""

from __future__ import annotations

from rich.text import Text

from sgdiag.session.recording import ReplayFeed
from sgdiag.tui.paint import Look, fit, two_lines

_LEAST_BAR = 8


def player_keys(feed: ReplayFeed) -> list[tuple[str, str]]:
    """The keys that stand below every screen of a recording, and what they do now, the most important first."""
    return [
        ("space", "play" if feed.paused or feed.ended else "pause"),
        ("← →", "10s"),
        (", .", "step"),
        ("[ ]", "speed"),
    ]


def player_lines(look: Look, feed: ReplayFeed, width: int) -> list[Text]:
    """State, place, pace and frame on one line; below it the note, where there is one."""
    state = look.ink("▶ playing", "good")
    if feed.paused:
        state = look.ink("‖ paused ", "warn")
    elif feed.ended:
        state = look.ink("■ at end ", "warn")
    end = moment(feed.length_s)
    place = f"  {moment(feed.position_s):>{len(end)}} / {end}  "
    last = f"{feed.frames:,}"
    # As wide as it will get, so that the bar does not move.
    rest = f"  {feed.speed:g}x{' ↻' * feed.loop}  frame {feed.frame + 1:>{len(last)},} of {last}"
    room = width - state.cell_len - len(place) - len(rest)
    bar = look.join()
    if room >= _LEAST_BAR:
        done = round(room * (feed.position_s / feed.length_s if feed.length_s else 1.0))
        bar = look.join(look.ink("━" * done, "good"), look.ink("─" * (room - done), "label"))
    lines = [fit(look.join(state, place, bar, look.ink(rest, "label")), width)]
    if feed.header.note:
        lines += two_lines(look.ink(feed.header.note, "label"), width)
    return lines


def moment(seconds: float) -> str:
    """``0:42``, ``12:05``, ``3:00:07``"""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
