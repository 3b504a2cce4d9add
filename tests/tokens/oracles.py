"""What every policy does on models that draw token by token, for one head of keys and values and
the G query heads that share it, with lists and loops in float64: written from the papers' formulas
and our readings of them (the manuals), not from the program."""

import math
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Token:
    """An image token in the cache. seen: weight of every query since it came, the mean over the
    group's query heads."""

    number: int
    key: np.ndarray
    value: np.ndarray
    seen: list = field(default_factory=list)

    def weights(self, queries: int) -> float:
        """Mean over the newest queries; those before the token existed count 0."""
        return sum(self.seen[-queries:]) / queries


@dataclass
class Stage:
    """What a decision may look at. queries: [G, H] each."""

    tokens: list[Token]
    capacity: int
    period: int
    queries: list[np.ndarray]
    local: bool = False
    number: int = 0

    @property
    def surplus(self) -> int:
        return len(self.tokens) - self.capacity


def simulate(
    q, k, v, visible, *, slots, period, decide, window=None, group=None, kept=None, full=True
):
    """Outputs [steps, G, H] of image tokens and the numbers held at the end.

    q: [G, M + N, H], of query heads that share keys and values. k, v: [M + N, H]. group: (stage,
    function of weights newest first -> whether a query head is local). kept: capacity from the
    grouping on. full: heads hold as much as they may.
    """
    condition = len(visible)
    steps = len(k) - condition - 1
    decided = math.ceil(steps / period) - 1
    fixed = [i for i in range(condition) if visible[i]]
    tokens, outputs, queries, local = [], [], [], False
    for t in range(steps):
        query = q[:, condition + t].astype(np.float64)
        queries.append(query)
        tokens.append(Token(t, k[condition + t].astype(np.float64), v[condition + t]))
        seen = [x for x in tokens if not local or x.number > t - window]
        keys = np.array([k[i] for i in fixed] + [x.key for x in seen], np.float64)
        values = np.array([v[i] for i in fixed] + [x.value for x in seen], np.float64)
        weights = [softmax(keys @ one) for one in query]
        outputs.append([w @ values for w in weights])
        mean = sum(weights) / len(weights)
        ours = dict(zip([x.number for x in seen], mean[len(fixed) :], strict=True))
        for x in tokens:
            x.seen.append(ours.get(x.number, 0.0))
        assert len(tokens) <= slots
        stage = t // period
        if (t + 1) % period or stage >= decided:
            continue
        if group is not None and stage == group[0]:
            # the condition lies behind all image tokens; one global query head makes all global
            newest_first = ([*w[len(fixed) :][::-1], *w[: len(fixed)][::-1]] for w in weights)
            local = all([group[1](w) for w in newest_first])
        capacity = slots - period
        if kept is not None and stage >= group[0]:
            capacity = kept
        now = Stage(tokens, capacity, period, queries[-period:], local, stage)
        if now.surplus > 0 or not full:
            tokens = decide(now)
            assert len(tokens) == capacity or (not full and len(tokens) < capacity)
    return np.array(outputs), [x.number for x in tokens]


def softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def need(weights_newest_first, threshold):
    """The smallest m for which the newest m tokens have the threshold."""
    total = 0.0
    for m, weight in enumerate(weights_newest_first, 1):
        total += weight
        if total >= threshold:
            return m
    return len(weights_newest_first) + 1


def without_lowest(tokens, score, count):
    """All but the `count` lowest; of equals the older goes."""
    gone = sorted(tokens, key=lambda x: (score(x), x.number))[:count]
    return [x for x in tokens if x not in gone]


def mean_logit(stage):
    mean = np.mean(stage.queries, axis=(0, 1))  # over queries and their groups
    return lambda x: float(x.key @ mean)


def mean_attention(stage):
    return lambda x: x.weights(stage.period)


def parts(stage, window, sinks):
    """First tokens, history, newest ones."""
    newest = stage.tokens[-window:]
    history = [x for x in stage.tokens[:-window] if x.number >= sinks]
    return [x for x in stage.tokens if x not in newest and x not in history], history, newest


def headkv(window, score, far_share=0.5, sinks=0):
    def decide(stage):
        first, history, newest = parts(stage, window, sinks)
        count = stage.surplus
        if stage.local:
            return first + history[count:] + newest
        split = math.floor(len(history) * far_share + 1e-9)
        far, near = history[:split], history[split:]
        from_near, from_far = (count + 1) // 2, count // 2
        if from_far > len(far):
            from_near, from_far = count - len(far), len(far)
        if from_near > len(near):
            from_near, from_far = len(near), count - len(near)
        value = score(stage)
        far = without_lowest(far, value, from_far)
        return first + far + without_lowest(near, value, from_near) + newest

    return decide


def linear(window, score, sinks=0):
    def decide(stage):
        first, history, newest = parts(stage, window, sinks)
        return first + without_lowest(history, score(stage), stage.surplus) + newest

    return decide


def h2o(share=0.5):
    def decide(stage):
        newest = math.floor(share * stage.capacity + 1e-9)
        split = len(stage.tokens) - newest
        heavy, recent = stage.tokens[:split], stage.tokens[split:]
        return without_lowest(heavy, lambda x: sum(x.seen), stage.surplus) + recent

    return decide


def snapkv(window, kernel=5):
    def decide(stage):
        old, newest = stage.tokens[:-window], stage.tokens[-window:]
        votes = [x.weights(window) for x in old] + [-np.inf] * len(newest)
        side = kernel // 2
        pooled = {x.number: max(votes[max(0, i - side) : i + side + 1]) for i, x in enumerate(old)}
        order = sorted(old, key=lambda x: (pooled[x.number], x.weights(window), x.number))
        gone = order[: stage.surplus]
        return [x for x in stage.tokens if x not in gone]

    return decide


def rkv(window, mix=0.1, kernel=7):
    def decide(stage):
        old, newest = stage.tokens[:-window], stage.tokens[-window:]
        importance = np.zeros(len(old))
        for query in stage.queries[-window:]:
            scores = np.array([(query @ x.key).max() for x in old])  # the largest of the group
            importance += softmax(scores) / window
        side = kernel // 2
        importance = [importance[max(0, i - side) : i + side + 1].max() for i in range(len(old))]
        n = len(stage.tokens)
        similar = np.zeros((n, n))
        for i, a in enumerate(stage.tokens):
            for j, b in enumerate(stage.tokens):
                lengths = (np.linalg.norm(a.key) + 1e-8) * (np.linalg.norm(b.key) + 1e-8)
                similar[i, j] = 0 if i == j else a.key @ b.key / lengths
            like = [j for j in range(n) if similar[i, j] > 0.5]
            if like:
                similar[i, like[-1]] = 0
        mean = similar.mean(0)
        redundancy = softmax(mean)
        score = {
            x.number: mix * importance[i] - (1 - mix) * redundancy[i] for i, x in enumerate(old)
        }
        return without_lowest(old, lambda x: score[x.number], stage.surplus) + newest

    return decide


def table(keep):
    """keep: bool [K, tokens] of one head."""

    def decide(stage):
        return [x for x in stage.tokens if keep[stage.number + 2, x.number]]

    return decide


def ring(slots, sinks=0):
    """Known contents: `sinks` tokens, then the newest."""

    def decide(stage):
        return stage.tokens[:sinks] + stage.tokens[sinks + 1 :]

    return {"slots": slots, "period": 1, "decide": decide}
