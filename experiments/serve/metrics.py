"""What a server counts, as Prometheus reads it (text format 0.0.4)."""

import bisect
import threading
from collections import Counter

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # seconds
KINDS = {
    "varjax_requests_total": ("counter", "Answers, by path and status."),
    "varjax_images_total": ("counter", "Pictures that were drawn."),
    "varjax_batches_total": ("counter", "Batches that were drawn, by the number of their images."),
    "varjax_draw_seconds": ("histogram", "Time that a batch took on the device and to the host."),
    "varjax_request_seconds": ("histogram", "Time from a request to its pictures."),
    "varjax_queue_images": ("gauge", "Pictures that wait."),
    "varjax_queue_limit": ("gauge", "Pictures that may wait."),
    "varjax_largest_batch": ("gauge", "Images that are drawn at once, at most."),
    "varjax_kv_bytes": ("gauge", "Bytes of keys and values of the largest batch."),
}


class _Histogram:
    def __init__(self):
        self.counts, self.sum = [0] * (len(BUCKETS) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(BUCKETS, value)] += 1
        self.sum += value

    def lines(self, name: str) -> list[str]:
        found, total = [], 0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self.counts, strict=True):
            total += count
            found.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*found, f"{name}_sum {self.sum:.6f}", f"{name}_count {total}"]


class Metrics:
    """Counters of one server. All methods may be called from any thread."""

    def __init__(self):
        self._lock = threading.Lock()
        self._requests, self._batches, self._images = Counter(), Counter(), 0
        self._histograms = {n: _Histogram() for n, (k, _) in KINDS.items() if k == "histogram"}

    def answered(self, path: str, status: int) -> None:
        with self._lock:
            self._requests[path, status] += 1

    def drew(self, images: int, seconds: float) -> None:
        with self._lock:
            self._images += images
            self._batches[images] += 1
            self._histograms["varjax_draw_seconds"].add(seconds)

    def served(self, seconds: float) -> None:
        with self._lock:
            self._histograms["varjax_request_seconds"].add(seconds)

    def text(self, gauges: dict[str, int]) -> str:
        """The page of /metrics. gauges: values of the gauges in `KINDS`."""
        with self._lock:
            found = {
                "varjax_requests_total": [
                    f'varjax_requests_total{{path="{path}",status="{status}"}} {count}'
                    for (path, status), count in sorted(self._requests.items())
                ],
                "varjax_images_total": [f"varjax_images_total {self._images}"],
                "varjax_batches_total": [
                    f'varjax_batches_total{{images="{images}"}} {count}'
                    for images, count in sorted(self._batches.items())
                ],
                **{name: h.lines(name) for name, h in self._histograms.items()},
                **{name: [f"{name} {value}"] for name, value in gauges.items()},
            }
        lines = []
        for name, (kind, words) in KINDS.items():
            lines += [f"# HELP {name} {words}", f"# TYPE {name} {kind}", *found.get(name, [])]
        return "\n".join(lines) + "\n"
