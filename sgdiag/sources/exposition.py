"""Prometheus text to the few samples that matter, cheaply."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from sgdiag.model import SourceError

MAX_SAMPLES = 20_000

MAX_VALUE = 2.0**48
"""No number of a server's is as large; all samples together still add up to less than 64 bits hold."""


class Sample(msgspec.Struct, frozen=True):
    """One line: a name, its labels, a value of at most ``MAX_VALUE`` either way."""

    name: str
    labels: Mapping[str, str]
    value: float


class SampleReader:
    """Reads the samples of the metrics called ``names``, and nothing else, out of one text after the other.

    A regular expression picks their lines, a hundredth of the cost of parsing all; and since the same series come
    again with each text, each is parsed once and only its value is read from then on.
    """

    def __init__(self, names: Iterable[str]) -> None:
        alternatives = b"|".join(re.escape(name.encode()) for name in sorted(names))
        self._lines = re.compile(rb"^(?:" + alternatives + rb")[{ \t][^\n]*", re.MULTILINE)
        self._series: dict[bytes, Sample] = {}

    def read(self, text: bytes) -> list[Sample]:
        """All samples but those with NaN or a value beyond ``MAX_VALUE``.

        Raises SourceError for what is not Prometheus text and for more than ``MAX_SAMPLES`` samples.
        """
        lines = [match.group() for _, match in zip(range(MAX_SAMPLES + 1), self._lines.finditer(text), strict=False)]
        if len(lines) > MAX_SAMPLES:
            raise SourceError(
                f"/metrics has more than {MAX_SAMPLES} series of the metrics that sgdiag reads",
                "a custom label with too many values? see --tokenizer-metrics-allowed-custom-labels",
            )
        if len(self._series) > 2 * MAX_SAMPLES:
            self._series.clear()
        found = [self._sample(line) for line in lines]
        return [sample for sample in found if abs(sample.value) <= MAX_VALUE]

    def _sample(self, line: bytes) -> Sample:
        series, _, value = line.rstrip().rpartition(b" ")
        known = self._series.get(series)
        if known is None:
            parsed, timed = _parse(line)
            if timed:
                return parsed
            self._series[series] = known = parsed
        try:
            return Sample(known.name, known.labels, float(value))
        except ValueError as error:
            raise _not_prometheus(line) from error


def _parse(line: bytes) -> tuple[Sample, bool]:
    """The sample in ``line``, and whether a time stamp follows its value."""
    try:
        (family,) = text_string_to_metric_families(line.decode("utf-8", "replace") + "\n")
        (sample,) = family.samples
    except (ValueError, LookupError, OverflowError) as error:
        raise _not_prometheus(line) from error
    return Sample(sample.name, sample.labels, sample.value), sample.timestamp is not None


def _not_prometheus(line: bytes) -> SourceError:
    return SourceError(f"/metrics is not Prometheus text: {line[:80]!r}")
