"""The application: one snapshot a second, ten screens, redrawn where they changed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Click
from textual.reactive import Reactive
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import ContentSwitcher, Static

from sgdiag.analysis import format as fmt
from sgdiag.analysis.history import History
from sgdiag.model import SEVERITY, Finding, Known, SgdiagError, Snapshot
from sgdiag.session.advised import server_pid
from sgdiag.session.feed import Feed
from sgdiag.session.recording import ReplayFeed
from sgdiag.tui.help import HelpScreen
from sgdiag.tui.page import Page, Picker, Tail
from sgdiag.tui.paint import Look, Palette, fit, two_lines
from sgdiag.tui.scene import Scene
from sgdiag.tui.themes import DARK, LIGHT, palette
from sgdiag.tui.views.arguments import arguments
from sgdiag.tui.views.banner import banner
from sgdiag.tui.views.collectives import collectives
from sgdiag.tui.views.common import VERDICT_SIGNS, health, model_name
from sgdiag.tui.views.findings import detail, finding_list, in_order, no_findings
from sgdiag.tui.views.graphs import graphs
from sgdiag.tui.views.kv import kv_pool
from sgdiag.tui.views.log import log_head, log_lines
from sgdiag.tui.views.overview import overview
from sgdiag.tui.views.player import player_keys, player_lines
from sgdiag.tui.views.processes import processes
from sgdiag.tui.views.speculation import speculation
from sgdiag.tui.views.stacks import stacks

PERIOD_S = 1.0
RECORDED_AFTER_S = 10.0
"""A snapshot older than this is shown with its own date: it comes from a recording."""

PAGES: dict[str, Callable[[Scene], list[Text]]] = {
    "overview": overview,
    "kv": kv_pool,
    "speculation": speculation,
    "graphs": graphs,
    "collectives": collectives,
    "processes": processes,
    "arguments": arguments,
    "stacks": stacks,
}
SCREENS = {
    "overview": ("Overview", "Overview", "Home"),
    "kv": ("KV pool", "KV", "KV"),
    "speculation": ("Speculation", "Spec", "Spec"),
    "graphs": ("CUDA graphs", "Graphs", "Graphs"),
    "collectives": ("Collectives", "Comms", "Comms"),
    "processes": ("Processes", "Procs", "Procs"),
    "log": ("Log", "Log", "Log"),
    "findings": ("Findings", "Findings", "Finds"),
    "arguments": ("Args", "Args", "Args"),
    "stacks": ("Stacks", "Stacks", "Stacks"),
}
"""Screens in the order of their keys, 1 to 9 and then 0, each with names for wide to narrow terminals."""

WIND_S = 10
"""How far one press of an arrow key winds a recording."""

WITH_FRAMES = frozenset({"processes", "stacks"})
"""Screens that can show all Python frames."""

_COUNT_CELLS = 4
"""Room that the bar of screens keeps for a sign and a number of findings, so that names do not change with them."""


def key_of(name: str) -> str:
    """The number key that opens a screen."""
    return str((list(SCREENS).index(name) + 1) % 10)


def _titles(width: int, current: str) -> dict[str, str]:
    """The names of all screens with their keys, as long as fits; where none does, the current one's alone."""
    for size, after in ((0, " "), (0, ""), (1, ""), (2, "")):
        titles = {name: f" {key_of(name)} {names[size]}{after}" for name, names in SCREENS.items()}
        if sum(map(len, titles.values())) + _COUNT_CELLS <= width:
            return titles
    return {name: f" {key_of(name)}{f' {names[2]}' * (name == current)}" for name, names in SCREENS.items()}


class Main(Screen[None]):
    """What lies under all windows. No style depends on the focus, so that its change alone repaints nothing."""

    focused: Reactive[Widget | None] = Reactive(None, repaint=False)


class SgdiagApp(App[None]):
    """Screens over a feed. ``evaluate`` draws findings from each snapshot; ``clock`` tells live from recorded."""

    CSS_PATH = "app.tcss"
    TITLE = "sgdiag"
    COMMAND_PALETTE_BINDING = "ctrl+p"
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key_of(name), f"go('{name}')", show=False) for name in SCREENS),
        Binding("tab", "step(1)", show=False, priority=True),
        Binding("shift+tab", "step(-1)", show=False, priority=True),
        Binding("s", "sources", "Sources"),
        Binding("t", "shade", "Dark or light"),
        Binding("w", "wrap", show=False),
        Binding("f", "frames", show=False),
        Binding("space", "pause", show=False),
        Binding("comma", "frame(-1)", show=False),
        Binding("full_stop", "frame(1)", show=False),
        Binding("left", f"wind(-{WIND_S})", show=False, priority=True),
        Binding("right", f"wind({WIND_S})", show=False, priority=True),
        Binding("shift+left", f"wind(-{6 * WIND_S})", show=False, priority=True),
        Binding("shift+right", f"wind({6 * WIND_S})", show=False, priority=True),
        Binding("left_square_bracket", "speed(-1)", show=False),
        Binding("right_square_bracket", "speed(1)", show=False),
        Binding("question_mark", "help", "Help"),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "copy_or_quit", show=False, priority=True),
    ]

    def __init__(
        self,
        feed: Feed,
        evaluate: Callable[[Snapshot], Sequence[Finding]] | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self.animation_level = "none"
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = DARK.name
        self.feed = feed
        self.failure: SgdiagError | None = None
        self._player = feed if isinstance(feed, ReplayFeed) else None
        self._evaluate = evaluate
        self._clock = clock
        self.history = History()
        self._snapshot = Snapshot()
        self._findings: list[Finding] | None = None
        self._palette: Palette = {}
        self.current = "overview"
        self._sources = False
        self._wrapped = False
        self._frames = False
        self._paused: Snapshot | None = None
        self._shown: dict[str, Text] = {}
        self._tab_ends: dict[str, int] = {}

    # Widgets

    def get_default_screen(self) -> Screen[None]:
        return Main()

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="tabs")
        yield Static(id="banner")
        with ContentSwitcher(initial="overview"):
            for name in PAGES:
                yield Page(id=name)
            with Vertical(id="log"):
                yield Page(id="log-head")
                yield Tail(id="log-tail")
            with Vertical(id="findings"):
                yield Picker(id="finding-list")
                yield Page(id="finding")
        yield Static(id="player")
        yield Static(id="foot")

    def on_mount(self) -> None:
        self._palette = palette(self.get_css_variables())
        self.query_one("#player").display = self._player is not None
        self.theme_changed_signal.subscribe(self, self._repaint)
        self.query_one("#overview").focus()
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            # Otherwise the signal's default would leave the terminal as the application has set it.
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)
        self.set_interval(PERIOD_S, self.poll)
        self.poll()

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    def _repaint(self, _theme: object) -> None:
        self._palette = palette(self.get_css_variables())
        self._shown.clear()
        for page in self._main.query(Page):
            page.show([])
        self._draw()

    # One second

    def poll(self) -> None:
        """Takes the newest snapshot, remembers it and draws what changed."""
        try:
            self._snapshot = self.feed.latest()
        except SgdiagError as error:
            self.failure = error
            self.exit()
            return
        for snapshot in self._player.passed() if self._player is not None else (self._snapshot,):
            self.history.add(snapshot)
        if self._evaluate is not None:
            self._findings = in_order(self._evaluate(self._snapshot))
        self._draw()

    @property
    def _main(self) -> Screen[object]:
        """What lies under any window that is open."""
        return self.screen_stack[0]

    def _draw(self) -> None:
        if not self._main.query("#banner"):
            # A redraw that was asked for before the widgets were taken down.
            return
        look = Look(self._snapshot, self._palette, self._sources)
        scene = Scene(
            look,
            self.size.width - 2,
            self.size.height,
            self.history,
            self._findings,
            frames=self._frames,
            pid=server_pid(self._snapshot, None) if self._player is None else None,
        )
        self._put("head", self._head(scene))
        self._put("tabs", self._tabs(scene))
        self._put("foot", self._foot(look))
        if self._player is not None:
            self._put("player", Text("\n").join(player_lines(look, self._player, scene.width)))
        self._draw_banner(scene)
        # A page that has been hidden does not know its own size yet.
        height = self._main.query_one(ContentSwitcher).size.height
        if scene.width <= 0 or height <= 0:
            return
        if self.current == "log":
            self._draw_log(scene)
        elif self.current == "findings":
            self._draw_findings(scene)
        else:
            page = self._main.query_one(f"#{self.current}", Page)
            page.show(PAGES[self.current](replace(scene, height=height)))

    def _put(self, name: str, text: Text) -> None:
        before = self._shown.get(name)
        if before != text:
            self._shown[name] = text
            # Laying all out each second would also draw the scroll bars anew.
            grown = before is None or before.plain.count("\n") != text.plain.count("\n")
            self._main.query_one(f"#{name}", Static).update(text, layout=grown)

    def _draw_banner(self, scene: Scene) -> None:
        message = banner(scene)
        widget = self._main.query_one("#banner", Static)
        if widget.has_class("shown") != (message is not None):
            widget.set_class(message is not None, "shown")
            self.call_after_refresh(self._draw)
        if message is not None:
            self._put("banner", Text("\n").join(two_lines(scene.look.ink(*message), scene.width)))

    def _draw_log(self, scene: Scene) -> None:
        head, tail = self._main.query_one("#log-head", Page), self._main.query_one("#log-tail", Page)
        held = self._paused.log if self._paused is not None else None
        head.show(log_head(scene, held=held, wrapped=self._wrapped))
        entries = (held or self._snapshot.log).tail
        tail.show(log_lines(scene.look, entries, scene.width, wrapped=self._wrapped))
        if self._paused is None:
            # Now, so that the end is what is drawn, and again where the lines above it take or leave room.
            tail.scroll_end(animate=False, immediate=True)
            self.call_after_refresh(tail.scroll_end, animate=False, immediate=True)

    def _draw_findings(self, scene: Scene) -> None:
        listed, page = self._main.query_one("#finding-list", Picker), self._main.query_one("#finding", Page)
        findings = self._findings or []
        listed.display = bool(findings)
        listed.show(finding_list(scene.look, findings, scene.width))
        page.show(detail(scene, findings[listed.chosen]) if findings else no_findings(scene))

    def on_tail_left(self) -> None:
        """Whoever scrolls up wants to read: nothing moves until the end is asked for."""
        self._paused = self._paused or self._snapshot
        self._draw()

    def on_tail_end(self) -> None:
        self._paused = None
        self._draw()

    def on_picker_chosen(self) -> None:
        self._main.query_one("#finding", Page).scroll_home(animate=False)
        self._draw()

    # The lines above and below

    def _head(self, scene: Scene) -> Text:
        look, server = scene.look, scene.snapshot.server
        left = look.join(look.ink("sgdiag", "title"), "  ", health(look), "  ", look.ink(self.feed.title, "label"))
        if isinstance(server.release, Known):
            left = look.join(left, "  ", look.ink(f"SGLang {server.release.value}", "label"))
        name = model_name(server)
        if isinstance(name, Known):
            # Of a path, the end says which model it is.
            short = "/".join(name.value.rstrip("/").rsplit("/", 2)[-2:])
            left = look.join(left, "  ", look.ink(short, "strong"))
        at = scene.snapshot.at or self._clock()
        recorded = abs(self._clock() - at) > RECORDED_AFTER_S
        when = fmt.clock(at, self._clock())
        right = look.ink(f"  recorded {when}" if recorded else f"  {when}", "warn" if recorded else "label")
        room = max(scene.width - right.cell_len, 0)
        return look.join(fit(left, room), right)

    def _tabs(self, scene: Scene) -> Text:
        look = scene.look
        worst = next(
            (verdict for verdict in SEVERITY[:2] if any(f.verdict == verdict for f in scene.findings or ())), None
        )
        titles = _titles(scene.width, self.current)
        line = look.join()
        self._tab_ends.clear()
        for name, title in titles.items():
            line.append_text(look.ink(title, "tab" if name == self.current else "label"))
            if name == "findings" and worst is not None:
                sign, role = VERDICT_SIGNS[worst]
                number = sum(finding.verdict == worst for finding in scene.findings or ())
                line.append_text(look.ink(f"{sign}{number} " if title.endswith(" ") else f" {sign}{number}", role))
            self._tab_ends[name] = line.cell_len
        return line

    def _foot(self, look: Look) -> Text:
        """As many keys as fit, the more important ones before others."""
        screens, here = ("0-9", "screens"), self._keys_here()
        if self._player is not None:
            stop, wind, *others = player_keys(self._player)
            keys = [stop, wind, *here, *others, screens]
        else:
            sources = ("s", "hide sources" if self._sources else "sources")
            keys = [screens, *here, sources] + [("↑↓", "scroll")] * (self.current not in ("log", "findings"))
        keys += [("^p", "commands"), ("t", "theme")]
        shown, room = [("?", "help"), ("q", "quit")], self.size.width - 2
        for pair in keys:
            if len("   ".join(map(" ".join, [*shown, pair]))) <= room:
                shown.insert(-2, pair)
        return look.join(*(part for key, what in shown for part in (look.ink(key, "title"), f" {what}   ")))

    def _keys_here(self) -> list[tuple[str, str]]:
        """The keys that only the open screen has, and what they do now."""
        if self.current == "log":
            follow = [("space", "follow" if self._paused else "pause")] * (self._player is None)
            return [*follow, ("w", "unwrap" if self._wrapped else "wrap")]
        if self.current == "findings":
            return [("↑↓", "choose")]
        return [("f", "back" if self._frames else "frames")] * (self.current in WITH_FRAMES)

    # Actions

    def check_action(self, action: str, _parameters: tuple[object, ...]) -> bool | None:
        """The main screen's keys do nothing while a window lies over it."""
        if action in ("frame", "wind", "speed") and self._player is None:
            return False
        ours = {"go", "step", "sources", "wrap", "frames", "pause", "help", "frame", "wind", "speed"}
        return not (action in ours and len(self.screen_stack) > 1)

    def action_go(self, name: str) -> None:
        self.current = name
        self._main.query_one(ContentSwitcher).current = name
        focus = {"log": "log-tail", "findings": "finding-list" if self._findings else "finding"}.get(name, name)
        self._main.query_one(f"#{focus}").focus()
        self._draw()

    @on(Click, "#tabs")
    def _click_tab(self, event: Click) -> None:
        hit = next((name for name, end in self._tab_ends.items() if event.x - 1 < end), None)
        if hit is not None:
            self.action_go(hit)

    def action_step(self, screens: int) -> None:
        names = list(SCREENS)
        self.action_go(names[(names.index(self.current) + screens) % len(names)])

    def action_sources(self) -> None:
        self._sources = not self._sources
        self._draw()

    def action_shade(self) -> None:
        self.theme = LIGHT.name if self.current_theme.dark else DARK.name

    def action_wrap(self) -> None:
        self._wrapped = not self._wrapped
        self._main.query_one("#log-tail").set_class(self._wrapped, "wrapped")
        self._draw()

    def action_frames(self) -> None:
        """Only where frames are shown: elsewhere nobody would see what the key did."""
        if self.current in WITH_FRAMES:
            self._frames = not self._frames
            self._main.query_one(f"#{self.current}", Page).scroll_home(animate=False)
            self._draw()

    def action_pause(self) -> None:
        """Stops a recording, or else the log, or lets it go on."""
        if self._player is not None:
            self._player.pause()
            self.poll()
            return
        self._paused = None if self._paused is not None else self._snapshot
        self._draw()

    def action_frame(self, frames: int) -> None:
        if self._player is not None:
            self._player.step(frames)
            self.poll()

    def action_wind(self, seconds: int) -> None:
        if self._player is not None:
            self._player.seek(seconds)
            self.poll()

    def action_speed(self, steps: int) -> None:
        if self._player is not None:
            self._player.faster(steps)
            self.poll()

    def action_help(self) -> None:
        self.push_screen(HelpScreen(self._palette, recorded=self._player is not None))

    def action_copy_or_quit(self) -> None:
        text = self.screen.get_selected_text()
        if text:
            self.copy_to_clipboard(text)
            self.screen.clear_selection()
        else:
            self.exit()

    def get_system_commands(self, _screen: Screen[object]) -> Iterable[SystemCommand]:
        for name, names in SCREENS.items():
            yield SystemCommand(
                names[0], f"Open this screen (key {key_of(name)})", lambda name=name: self.action_go(name)
            )
        yield SystemCommand("Sources", "Show where each value comes from, or hide it (key s)", self.action_sources)
        yield SystemCommand("Theme", "Choose the colours", self.action_change_theme)
        yield SystemCommand("Help", "Keys and signs (key ?)", self.action_help)
        yield SystemCommand("Quit", "Leave sgdiag; the server is not touched (key q)", self.exit)
