"""What one session's attention cost and touched."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Figures:
    """Running totals over all layers and steps of a session.

    Times in nanoseconds of wall clock; on a GPU those of the host, which hands out work and goes on. Key counts are
    summed over query positions, layers and KV heads: `kept` keys were chosen by a search, `attended` adds sinks, recent
    window and tail, `available` is what full attention would have read. `searches` counts pairs of layer and query
    position that were searched. The `sparse_` figures leave out layers that attend to everything.

    Of captured steps over keys and values in host memory: `host_bytes_read` of them by the device, `rows_reused` found
    in slots on the device, one for each token and KV head, and `device_wait_for_host_ns` in which the device stood
    still because the host was not done.

    drafted: tokens that were proposed and verified. accepted: of these, those that were right. audited: steps that were
    taken with full attention, too, and audited_kl_nanonats the sum of their KL(full || method).
    """

    search_ns: int = 0
    gather_ns: int = 0
    attend_ns: int = 0
    append_ns: int = 0
    searches: int = 0
    kept: int = 0
    sparse_attended: int = 0
    sparse_available: int = 0
    attended: int = 0
    available: int = 0
    device_wait_for_host_ns: int = 0
    host_bytes_read: int = 0
    rows_reused: int = 0
    drafted: int = 0
    accepted: int = 0
    audited: int = 0
    audited_kl_nanonats: int = 0

    @property
    def sparse_fraction(self) -> float:
        """Fraction of the keys touched in the layers that search; 0 when no layer did."""
        return self.sparse_attended / self.sparse_available if self.sparse_available else 0.0

    @property
    def fraction(self) -> float:
        """Fraction of the keys touched over all layers."""
        return self.attended / self.available if self.available else 0.0

    def become(self, other: Figures) -> None:
        """Takes over another one's."""
        for own in fields(self):
            setattr(self, own.name, getattr(other, own.name))

    def note_audit(self, kl: float) -> None:
        """Notes a step's KL in nats."""
        self.audited += 1
        self.audited_kl_nanonats += round(kl * 1e9)

    def count_dense(self, keys: int, available: int | None = None) -> None:
        """Notes `keys` attended by a layer that no search of ours leaves any out of: all, or what the model selects."""
        self.attended += keys
        self.available += keys if available is None else available

    def count_kept(self, keys: int) -> None:
        """Notes `keys` attended because a search chose them."""
        self.kept += keys
        self.sparse_attended += keys
        self.attended += keys

    def count_exact(self, attended: int, available: int) -> None:
        """Notes the keys that a searching layer attends to always, and those that full attention would have read."""
        self.sparse_attended += attended
        self.sparse_available += available
        self.attended += attended
        self.available += available
