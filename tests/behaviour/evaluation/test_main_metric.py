"""Which metric says how good a checkpoint is, and which of two is better."""

from tests.support.tables import rows
from vitscale.evaluation.main_metric import score_of


# The first metric of the preferred ones counts, whatever other metrics say. One that is no number,
# or of which no direction is known (ece), never does.
@rows("""
- [metrics, expected]
- [{val/top1: 0.5, val/loss: 1.0, val/knn_top1: 0.9, val/ece: 0.1}, val/top1]
- [{val/loss: 1.0, val/knn_top1: 0.9}, val/knn_top1]
- [{val/subset_top1: 0.9, val/loss: 1.0}, val/loss]
- [{val/linear_top1: 0.8, val/knn_top1: 0.9}, val/linear_top1]
- [{val/subset_error: 0.1, val/subset_top1: 0.9}, val/subset_top1]
- [{val/top1: .nan, val/loss: 1.0}, val/loss]
- [{val/top1: 0.9, val/loss: 1.0, val/ema_top1: 0.8, val/ema_loss: 2.0}, val/ema_top1]
- [{val/ece: 0.1, val/top1: .inf}, null]
- [{}, null]
""")
def test_the_preferred_metric_counts(metrics, expected):
    """That of the average, where there is one, since commands take it."""
    score = score_of(metrics)
    assert (score and score["metric"]) == expected
    assert score is None or score["value"] == metrics[score["metric"]]


# Better is higher or lower by the metric; a preferred metric beats any value of another one, since
# their values cannot be compared.
@rows("""
- [worse, better]
- [{val/top1: 0.5}, {val/top1: 0.6}]
- [{val/loss: 2.0}, {val/loss: 1.0}]
- [{val/knn_top1: 0.9}, {val/top1: 0.1}]
- [{val/loss: 0.1}, {val/knn_top1: 0.1}]
- [{val/ema_top1: 0.5, val/top1: 0.9}, {val/ema_top1: 0.6, val/top1: 0.1}]
""")
def test_scores_are_ordered(worse, better):
    """A run's evaluations may have different intervals."""
    low = score_of(worse)
    high = score_of(better)
    assert low["order"] < high["order"]
