"""Key clusters: queries compared with the mean keys of clusters (Squeezed Attention sections 3.1-3.2).

Keys are clustered by k-means, block by block; a cluster's mean key stands for all of its keys, so the search reads one
vector where there are 16 keys or so, and a remainder can approximate the clusters that were not selected (Multipole
Attention section 3.2). Keys that arrive while decoding join clusters of the session's own.

Those that arrive are clustered in blocks of W consecutive keys (Multipole Attention section 3.3). Only the last, open
block changes: it grows to W + W/2 keys, then its first W become a closed block of their own and the others stay open.
Appended keys first join the nearest cluster of the open block, some of them as seeds of new clusters, then a few
k-means iterations over all of the open block refine it.

Shape legend: H KV heads, T positions or appended keys, G group heads, N keys, X keys of a block or all, C clusters,
d head dim, E = d + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.indexes.interface.layer_index import (
    AppendedKeys,
    Asked,
    GrowingRows,
    LayerIndex,
    LayerSource,
)
from index_store.indexes.key_clusters.build import (
    build_clusters,
    build_tree,
    check_frequencies,
    measure,
    move_queries,
    sum_by_cluster,
    undo_rotary,
)
from index_store.indexes.key_clusters.parameters import (
    ClusterKind,
    ClusterParameters,
    ClusterSearch,
    TreeKind,
    TreeParameters,
    TreeSearch,
    most_open,
)
from index_store.indexes.key_clusters.tree_numba import search_tree
from index_store.indexes.kmeans.first_centroids import METRICS
from index_store.selection.ranking import ClusteredKeys, Items, Members, Ranking, ScoredClusters
from index_store.store.description.json_fields import Scalar

_REFINEMENTS = 3
_SCORES = 2**19  # products of keys and centroids held at a time: more would leave the second-level cache
_DEVICE_SCORES = 2**26  # the same on a GPU


class OnlineClusters(AppendedKeys):
    """A session's own clusters over all keys appended so far.

    The caller keeps the newest keys apart and appends them in batches; every append costs a clustering of the open
    block. The number of clusters is that of one for every `keys_per_cluster` keys of a block; a cluster that loses
    its last key has a count of 0 until newer keys seed it again.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        first_id: int,
        keys_per_cluster: int,
        metric: str,
        block: int,
        moments: str,
        frequencies: Tensor | None,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """first_id: of the first appended key. metric: one of METRICS. block: W; 0 never splits.

        moments: one of MOMENTS. frequencies: [d/2] inverse frequencies of the rotary embedding,
        which is undone before anything else, a key's id being its position (windowed RoPE); None keeps keys as they
        are. device: of the keys that will come. Raises InvalidArgumentError for a value out of range.
        """
        if metric not in METRICS:
            raise InvalidArgumentError(f"metric is {metric!r}, expected one of {', '.join(METRICS)}")
        if keys_per_cluster < 1 or block < 0:
            raise InvalidArgumentError(
                f"online clusters: {keys_per_cluster} keys per cluster in blocks of {block}; expected at least 1 "
                "key and a block of at least 0"
            )
        super().__init__(heads, head_dim)
        self._first_id = first_id
        self._keys_per_cluster = keys_per_cluster
        self._cosine = metric == "cosine"
        self._block = block
        self._limit = most_open(block)
        self._moments = moments
        self._frequencies = None if frequencies is None else check_frequencies(frequencies, head_dim)
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self._keys = GrowingRows(heads, head_dim, limit=self._limit, device=device)
        self._values = GrowingRows(heads, head_dim, limit=self._limit, device=device)
        # Clusters of the open block, counted from 0.
        self._open_HX = torch.empty(heads, 0, dtype=torch.int64, device=device)
        self._closed_keys = 0
        self._closed_clusters = 0
        self._assignment = GrowingRows(heads, dtype=torch.int32, device=device)
        self._closed_members = GrowingRows(heads, dtype=torch.int32, device=device)
        self._counts = GrowingRows(heads, device=device)
        self._means = GrowingRows(heads, head_dim, device=device)
        self._value_sums = GrowingRows(heads, head_dim, device=device)
        self._variances = None if moments == "none" else GrowingRows(heads, head_dim, device=device)
        self._members: Members | None = None

    def _extend(self, kv_HT2D: Tensor) -> None:
        keys, values = kv_HT2D[:, :, 0].float(), kv_HT2D[:, :, 1].float()
        if self._frequencies is not None:
            keys = undo_rotary(keys, self._first_id + self.count, self._frequencies)
        done = 0
        while done < keys.shape[1]:
            room = keys.shape[1] if self._limit is None else self._limit - self._keys.count
            self._join(keys[:, done : done + room], values[:, done : done + room])
            done += room
        self._members = None

    @property
    def nbytes(self) -> int:
        members = () if self._members is None else (self._members.offsets_HM, self._members.keys_HX)
        held: int = sum(tensor.numel() * tensor.element_size() for tensor in (self._open_HX, *members))
        return held + sum(rows.nbytes for rows in self._buffers())

    @property
    def clusters(self) -> ClusteredKeys:
        """The clusters of all appended keys, closed blocks first; views that the next append may overwrite."""
        return ClusteredKeys(
            counts_HC=self._counts.rows,
            means_HCD=self._means.rows,
            value_sums_HCD=self._value_sums.rows,
            assignment_HX=self._assignment.rows,
            first_id=self._first_id,
            variances_HCD=None if self._variances is None else self._variances.rows,
        )

    @property
    def members(self) -> Members:
        if self._members is None:
            ends = self._counts.rows.to(torch.int32).cumsum(1, dtype=torch.int32)
            self._members = Members(
                torch.nn.functional.pad(ends, (1, 0)),
                torch.cat([self._closed_members.rows, self._open_members()], dim=1),
            )
        return self._members

    def _buffers(self) -> Sequence[GrowingRows]:
        optional = [] if self._variances is None else [self._variances]
        always = (self._keys, self._values, self._assignment, self._closed_members)
        return (*always, self._counts, self._means, self._value_sums, *optional)

    def _join(self, keys_HTD: Tensor, values_HTD: Tensor) -> None:
        """Clusters new keys with the open block, which has room for them, and splits it when that fills it."""
        old = self._keys.count
        self._keys.append(keys_HTD)
        self._values.append(values_HTD)
        clusters = self._clusters_for(self._keys.count)
        points = self._points(self._keys.rows)
        sums = sum_by_cluster(points[:, :old], self._open_HX, clusters)
        joined = _nearest(points[:, old:], self._centroids(self._seed(points[:, old:], sums)))
        if self._keys.count == self._limit:
            self._split(points, torch.cat([self._open_HX, joined], dim=1))
        else:
            sums += sum_by_cluster(points[:, old:], joined, clusters)
            self._open_HX = self._refine(points, sums)
            self._store(self._keys.rows, self._values.rows, clusters)

    def _split(self, points_HXE: Tensor, assignment_HX: Tensor) -> None:
        """Closes the first W keys and leaves the others open, each part with clusters of its own."""
        both = self._clusters_for(points_HXE.shape[1])
        all_keys, all_values = self._keys.rows.clone(), self._values.rows.clone()
        for closes, part in ((True, slice(0, self._block)), (False, slice(self._block, None))):
            points, keys, values = points_HXE[:, part], all_keys[:, part], all_values[:, part]
            clusters = self._clusters_for(points.shape[1])
            sums = sum_by_cluster(points, assignment_HX[:, part], both)
            # Clusters span both parts; each part goes on with as many as it has keys for, those it fills most.
            largest = sums[..., -1].topk(clusters, dim=1).indices
            sums = sums.gather(1, largest[..., None].expand(-1, -1, sums.shape[2]))
            self._open_HX = self._refine(points, self._seed(points, sums))
            self._store(keys, values, clusters)
            if closes:
                self._closed_members.append(self._open_members())
                self._closed_keys += keys.shape[1]
                self._closed_clusters += clusters
        self._keys.put(0, keys)
        self._values.put(0, values)

    def _open_members(self) -> Tensor:
        """[H, X] int32: ids of the open block's keys, ordered by cluster."""
        ids = self._open_HX.argsort(dim=1, stable=True) + (self._first_id + self._closed_keys)
        return ids.to(torch.int32)

    def _store(self, keys_HXD: Tensor, values_HXD: Tensor, clusters: int) -> None:
        """Writes the open block's clusters behind those of the closed blocks."""
        moments = measure(keys_HXD, values_HXD, self._open_HX, clusters, self._moments)
        self._assignment.put(self._closed_keys, self._open_HX + self._closed_clusters)
        for rows, of_clusters in (
            (self._counts, moments.counts_HC),
            (self._means, moments.means_HCD),
            (self._value_sums, moments.value_sums_HCD),
            (self._variances, moments.variances_HCD),
        ):
            if rows is not None and of_clusters is not None:
                rows.put(self._closed_clusters, of_clusters)

    def _clusters_for(self, keys: int) -> int:
        return -(-keys // self._keys_per_cluster)

    def _points(self, keys_HXD: Tensor) -> Tensor:
        """What is clustered, [H, X, E]: keys or their directions, and a 1, so that sums hold counts."""
        points = torch.nn.functional.normalize(keys_HXD, dim=-1) if self._cosine else keys_HXD
        return torch.nn.functional.pad(points, (0, 1), value=1.0)

    def _seed(self, points_HTE: Tensor, sums_HCE: Tensor) -> Tensor:
        """The sums with one point drawn at random in every empty cluster, while there are points."""
        heads, new, width = points_HTE.shape
        empty = sums_HCE[..., -1] == 0
        # On the CPU, so that every device draws the same.
        drawn = torch.rand(heads, new, generator=self._generator, device="cpu").argsort(dim=1)
        drawn = drawn.to(points_HTE.device)
        number = empty.cumsum(1) - 1
        picked = drawn.gather(1, number.clamp(min=0, max=new - 1))
        seeds = points_HTE.gather(1, picked[..., None].expand(-1, -1, width))
        return torch.where((empty & (number < new))[..., None], seeds, sums_HCE)

    def _centroids(self, sums_HCE: Tensor) -> Tensor:
        """[H, C, E]: the centroid nearest to a point is the one of the largest product."""
        counts = sums_HCE[..., -1:]
        if self._cosine:
            centroids = torch.nn.functional.normalize(sums_HCE[..., :-1], dim=-1)
            biases = torch.zeros_like(counts)
        else:
            centroids = sums_HCE[..., :-1] / counts.clamp(min=1)
            biases = -0.5 * centroids.square().sum(-1, keepdim=True)
        return torch.cat([centroids, biases.masked_fill_(counts == 0, -torch.inf)], dim=-1)

    def _refine(self, points_HXE: Tensor, sums_HCE: Tensor) -> Tensor:
        """[H, X] int64: the points' clusters after a few iterations of k-means from the given sums."""
        assignment = _nearest(points_HXE, self._centroids(sums_HCE))
        for _ in range(_REFINEMENTS - 1):
            sums = sum_by_cluster(points_HXE, assignment, sums_HCE.shape[1])
            assignment = _nearest(points_HXE, self._centroids(sums))
        return assignment


def _nearest(points_HXE: Tensor, centroids_HCE: Tensor) -> Tensor:
    """[H, X] int64: the centroid of the largest product with every point."""
    heads, count, _ = points_HXE.shape
    nearest = torch.empty(heads, count, dtype=torch.int64, device=points_HXE.device)
    scores = _SCORES if points_HXE.device.type == "cpu" else _DEVICE_SCORES
    step = max(1, scores // (heads * centroids_HCE.shape[1]))
    transposed = centroids_HCE.transpose(1, 2)
    for low in range(0, count, step):
        nearest[:, low : low + step] = torch.bmm(points_HXE[:, low : low + step], transposed).max(-1).indices
    return nearest


def _level(arrays: Mapping[str, Tensor], level: str = "", parents_HC: Tensor | None = None) -> ClusteredKeys:
    counts, means, sums = (arrays[level + name] for name in ("counts", "means", "value_sums"))
    variances = arrays.get(f"{level}variances")
    return ClusteredKeys(
        counts, means, sums, arrays["assignment"], variances_HCD=variances, parents_HC=parents_HC
    )


class KeyClusters(ClusterKind, LayerIndex):
    """Flat clusters of one layer's keys."""

    def __init__(self, parameters: ClusterParameters, arrays: Mapping[str, Tensor]) -> None:
        super().__init__(arrays, arrays["assignment"].shape[1])
        self._parameters = parameters
        self._members = Members(arrays["offsets"], arrays["members"])
        self._clusters = _level(arrays)
        self._frequencies_F = arrays["frequencies"][0] if parameters.window > 0 else None

    @classmethod
    def build(cls, parameters: Mapping[str, Scalar], source: LayerSource, seed: int) -> Self:
        parsed = cls.parameters_type.parse(parameters)
        return cls(parsed, build_clusters(parsed, source, seed))

    @classmethod
    def from_arrays(
        cls, parameters: Mapping[str, Scalar], arrays: Mapping[str, Tensor], kv_HN2D: Tensor
    ) -> Self:
        return cls(cls.parameters_type.parse(parameters), arrays)

    def start_appending(self) -> OnlineClusters:
        heads, _, head_dim = self._clusters.means_HCD.shape
        return OnlineClusters(
            heads=heads,
            head_dim=head_dim,
            first_id=self.key_count,
            keys_per_cluster=self._parameters.keys_per_cluster,
            metric=self._parameters.metric,
            block=self._parameters.block,
            moments=self._parameters.moments,
            frequencies=self._frequencies_F,
            seed=0,
            device=self._clusters.means_HCD.device,
        )

    def _score(self, asked: Asked) -> Ranking:
        own = self._own_clusters(asked.appended)
        moved = self._moved(asked.queries_HTGD, asked.position)
        shared, vectors_read = self._search(moved, asked.search)
        groups, scored = [self._members], [shared[0]]
        if own is not None:
            groups.append(own.members)
            scored.append(score_clusters(own.clusters, moved))
            vectors_read += own.clusters.counts_HC.shape[1]
        logits = torch.cat([piece.logits_HTGC for piece in scored], dim=-1)
        pieces = (*shared, *scored[1:])
        return Ranking(logits, Items(asked.first_key, asked.end_key, tuple(groups)), pieces, vectors_read)

    def pieces(self, asked: Asked) -> tuple[ScoredClusters, ...]:
        own = self._own_clusters(asked.appended)
        moved = self._moved(asked.queries_HTGD, asked.position)
        shared, _ = self._search(moved, {})
        return shared if own is None else (*shared, score_clusters(own.clusters, moved))

    def _search(
        self, queries_HTGD: Tensor, search: Mapping[str, Scalar]
    ) -> tuple[tuple[ScoredClusters, ...], float]:
        """The context's pieces, first that of the clusters whose members are listed, and the vectors read for them."""
        ClusterSearch.parse(search)
        return (score_clusters(self._clusters, queries_HTGD),), float(self._clusters.counts_HC.shape[1])

    def _own_clusters(self, appended: AppendedKeys | None) -> OnlineClusters | None:
        """The session's clusters, None when there are none yet."""
        own = self._own(appended, OnlineClusters)
        return own if own.count else None

    def _moved(self, queries_HTGD: Tensor, position: int) -> Tensor:
        if self._frequencies_F is None:
            return queries_HTGD
        if position < 0:
            raise InvalidArgumentError(
                f"index kind {self.kind!r} with window {self._parameters.window} undoes the rotary embedding and "
                "needs the position of the first query"
            )
        return move_queries(queries_HTGD, position, self._parameters.window, self._frequencies_F)


def score_clusters(clusters: ClusteredKeys, queries_HTGD: Tensor) -> ScoredClusters:
    """Products of the queries with every cluster's mean key, -inf for empty clusters."""
    heads, positions, group, head_dim = queries_HTGD.shape
    flat = queries_HTGD.reshape(heads, positions * group, head_dim)
    logits = torch.bmm(flat, clusters.means_HCD.transpose(1, 2)).view(heads, positions, group, -1)
    logits.masked_fill_((clusters.counts_HC == 0)[:, None, None], -torch.inf)
    return ScoredClusters(clusters, logits, queries_HTGD)


class ClusterTree(TreeKind, KeyClusters):
    """Two levels of clusters of one layer's keys.

    The session's own clusters have no coarse level: they are few, and all of them are compared with every query.
    `pieces` without a ranking expands coarse clusters up to the default share of the keys.
    """

    def __init__(self, parameters: ClusterParameters, arrays: Mapping[str, Tensor]) -> None:
        super().__init__(parameters, arrays)
        self._coarse_offsets_HK = arrays["coarse_offsets"]
        self._coarse = _level(arrays, "coarse_", arrays["parents"])

    @classmethod
    def build(cls, parameters: Mapping[str, Scalar], source: LayerSource, seed: int) -> Self:
        parsed = TreeParameters.parse(parameters)
        return cls(parsed, build_tree(parsed, source, seed))

    def _search(
        self, queries_HTGD: Tensor, search: Mapping[str, Scalar]
    ) -> tuple[tuple[ScoredClusters, ...], float]:
        coarse_keep = TreeSearch.parse(search).coarse_keep
        coarse = score_clusters(self._coarse, queries_HTGD)
        expanded_HTK = expand(coarse.logits_HTGC, self._coarse.counts_HC, coarse_keep)
        logits = search_tree(
            queries_HTGD,
            self._clusters.means_HCD,
            self._clusters.counts_HC,
            self._coarse_offsets_HK,
            expanded_HTK,
        )
        compared = (expanded_HTK * self._coarse_offsets_HK.diff(dim=1)[:, None]).sum(-1)
        coarse.logits_HTGC.masked_fill_(expanded_HTK[:, :, None], -torch.inf)
        vectors_read = expanded_HTK.shape[2] + float(compared.double().mean())
        return (ScoredClusters(self._clusters, logits, queries_HTGD), coarse), vectors_read


def expand(logits_HTGK: Tensor, counts_HK: Tensor, keep: float) -> Tensor:
    """Which coarse clusters to expand, [H, T, K] bool: best first until they hold the share `keep` of the keys.

    They are ordered by S_i = exp(q.c_i) / sum_j N_j exp(q.c_j) averaged over the group (Multipole Attention eq. 1).
    The one that reaches the share is expanded as well.
    """
    totals = (logits_HTGK + counts_HK.log()[:, None, None]).logsumexp(-1, keepdim=True)
    scores_HTK = (logits_HTGK - totals).exp().mean(2)
    order = scores_HTK.argsort(dim=-1, descending=True, stable=True)
    sizes = counts_HK[:, None].expand_as(scores_HTK).gather(-1, order)
    before = sizes.cumsum(-1) - sizes
    wanted = before < keep * counts_HK.sum(-1)[:, None, None]
    expanded = torch.zeros_like(wanted).scatter_(-1, order, wanted)
    return expanded & (counts_HK > 0)[:, None]
