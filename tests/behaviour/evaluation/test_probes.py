"""Probes of features: kNN, few-shot regression and linear heads against slow versions."""

import itertools
import math

import numpy as np
import pytest
import torch

from tests.support.engine.subjects import (
    WORLD,
    array_subject,
    split_of,
)
from tests.support.tables import every, refused
from vitscale.evaluation.evaluation import (
    Features,
    Share,
    results,
)
from vitscale.evaluation.few_shot import (
    FewShot,
    FewShotSettings,
    class_orders,
    first_of_each,
    fit_ridge,
)
from vitscale.evaluation.knn import Knn, KnnSettings, evenly_spaced
from vitscale.evaluation.linear_heads import (
    LinearHeads,
    LinearHeadsSettings,
    column_choices,
    dev_split,
    epoch_batches,
    train_heads,
)

# Metrics are sums over the ranks of a group; here it has one.
pytestmark = pytest.mark.usefixtures("world")


# ---- kNN ----------------------------------------------------------------------------------------

TEMPERATURE = 0.07
CLASSES = 4


def normalized(rows, *, seed):
    generator = torch.Generator().manual_seed(seed)
    values_ND = torch.randn(rows, 8, generator=generator)
    return torch.nn.functional.normalize(values_ND, dim=1)


def brute_force(query, bank, labels, *, k):
    similar = sorted(
        (float(torch.dot(query, row)), int(label))
        for row, label in zip(bank, labels, strict=True)
    )

    # The weighted vote of the k nearest: Wu et al. 2018, sec. 3.4.
    votes = [0.0] * CLASSES
    for similarity, label in similar[::-1][:k]:
        votes[label] += math.exp(similarity / TEMPERATURE)
    return votes.index(max(votes))


@every(num_bank="60, 4")
def test_every_k_equals_brute_force(num_bank, capfd):
    # Lengths other than 1 have no say: the similarity is the cosine.
    bank = 3 * normalized(num_bank, seed=0)
    queries = 2 * normalized(40, seed=1)
    labels = [number % CLASSES for number in range(num_bank)]
    truth = [number % CLASSES for number in range(40)]
    subject = array_subject(split_of(bank, labels), split_of(queries, truth))
    settings = KnnSettings(
        k=5,
        also_k=(1, 50, 10),
        temperature=TEMPERATURE,
        max_bank_images=None,
    )
    metrics = Knn(settings).metrics(subject)

    # A bank of 4 images has fewer neighbours than most of these ask for, which is said.
    said = "knn: 50 neighbours of a bank of 4 images" in capfd.readouterr().err
    assert said == (num_bank == 4)
    names = {
        "knn_top1": 5,
        "knn1_top1": 1,
        "knn50_top1": 50,
        "knn10_top1": 10,
    }
    assert metrics.keys() == names.keys()
    for name, k in names.items():
        correct = 0
        for query, label in zip(queries / 2, truth, strict=True):
            guess = brute_force(query, bank / 3, torch.tensor(labels), k=k)
            correct += guess == label
        assert metrics[name] == correct / 40

    # The comparison is sensitive: another k guesses otherwise.
    assert num_bank < 5 or len(set(metrics.values())) > 1


def test_a_bank_is_thinned_evenly():
    # The samples 0, 2.5, 5 and 7.5, rounded down: an even step over the whole training set.
    assert evenly_spaced(10, at_most=4).tolist() == [0, 2, 5, 7]

    # A smaller bank is taken whole.
    for limit in (4, None):
        assert evenly_spaced(3, at_most=limit).tolist() == [0, 1, 2]


def test_features_of_earlier_weights_are_never_used():
    """Nor where an evaluation was left half way."""
    train = clusters(name="train")
    test = clusters(name="test")
    subject = array_subject(train, test)
    knn = [Knn(KnnSettings()), Knn(KnnSettings())]
    right = [{"knn_top1": 1.0}] * 2
    assert list(results(knn, subject)) == right

    # Other weights: each image has the features of one of the next class, so all are wrong.
    test.values = test.values.roll(1, dims=0)
    half = results(knn, subject)
    assert next(half) == {"knn_top1": 0.0}
    half.close()

    # The first weights again. Features kept by the half evaluation would still be wrong.
    test.values = test.values.roll(-1, dims=0)
    assert list(results(knn, subject)) == right


# ---- few-shot -----------------------------------------------------------------------------------

LABELS = np.array([2, 0, 0, 2, 2, 4, 0, 2, 4, 0])


def direct_scores(train, labels, test, *, num_classes):
    """The normal equations in float64, solved by LU, with a penalty of 1024."""
    train = train.astype(np.float64)
    test = test.astype(np.float64)
    mean = train.mean(axis=0)
    std = train.std(axis=0) + 1e-5

    def standardized(rows):
        # The constant is a bias that the penalty hardly touches.
        bias = np.full((len(rows), 1), 100.0)
        return np.concatenate([(rows - mean) / std, bias], axis=1)

    x = standardized(train)
    is_label = np.arange(num_classes) == labels[:, None]
    targets = np.where(is_label, 1.0, -1.0)
    gram = x.T @ x + 1024 * np.eye(x.shape[1])
    weights = np.linalg.solve(gram, x.T @ targets)
    return np.asarray(standardized(test) @ weights)


# Fewer images than the 24 features, as many, one more, and many.
@every(num_images="7, 24, 25, 300", std="5, 2.0e-05")
def test_ridge_equals_a_direct_solve(num_images, std):
    """Also of features that hardly differ, as those of a collapsed model."""
    random = np.random.default_rng(0)
    train, test = (
        random.normal(0.6 * std, std, (num, 24)).astype(np.float32)
        for num in (num_images, 9)
    )
    labels = random.integers(0, 4, num_images)
    scores = fit_ridge(
        torch.from_numpy(train),
        torch.from_numpy(labels),
        num_classes=5,
        l2=2.0**10,
    )

    # Four classes have images and the fifth has none: it gets scores as well.
    expected = direct_scores(train, labels, test, num_classes=5)
    given = scores(torch.from_numpy(test))[:, 0].numpy()
    assert np.abs(given - expected).max() < 1e-6


def test_draws_are_those_of_big_vision_and_nested():
    # One generator, one permutation a class, as in big_vision's fewshot_lsr.py.
    random = np.random.default_rng(1)
    expected = [random.permutation(np.where(LABELS == label)[0]) for label in (0, 2, 4)]
    orders = class_orders(LABELS, seed=1)
    assert list(map(list, orders)) == list(map(list, expected))

    # More shots contain the fewer, so that accuracies of a draw can be compared.
    three = first_of_each(orders, 3)
    one = first_of_each(orders, 1)
    assert set(one) < set(three)

    # A class with fewer images gives all of them.
    counts = np.bincount(LABELS[three])
    assert counts.tolist() == [3, 0, 3, 0, 2]


def test_accuracies_equal_a_direct_solve_of_every_draw():
    random = np.random.default_rng(3)
    labels = [number % 4 for number in range(60)]
    labels_N = np.array(labels)
    centres = random.normal(0, 1, (4, 6))
    # Noise larger than the distance of the centres: some images are taken for another class.
    train_ND, val_ND = (
        (centres[labels] + random.normal(0, 1.5, (60, 6))).astype(np.float32)
        for _ in "ab"
    )
    train = split_of(torch.from_numpy(train_ND), labels)
    val = split_of(torch.from_numpy(val_ND), labels)
    subject = array_subject(train, val)
    two_draws = FewShot(FewShotSettings(shots=(1, 3), num_draws=2))
    metrics = two_draws.metrics(subject)

    for shots in (1, 3):
        shares = []
        for seed in range(2):
            rows = first_of_each(class_orders(labels_N, seed=seed), shots)
            scores = direct_scores(
                train_ND[rows], labels_N[rows], val_ND, num_classes=4
            )
            shares.append(np.mean(scores.argmax(axis=1) == labels))
        assert metrics[f"few_shot{shots}_top1"] == pytest.approx(
            np.mean(shares), abs=1e-12
        )
        assert metrics[f"few_shot{shots}_std"] == pytest.approx(
            np.std(shares, ddof=1), abs=1e-12
        )

        # One draw has no deviation, but is a share of images, from which an interval follows.
        one = FewShot(FewShotSettings(shots=(shots,), num_draws=1)).metrics(subject)
        (top1,) = one.values()
        assert isinstance(top1, Share)
        assert top1 == shares[0]
        assert top1.images == 60

    # The data are neither trivial nor hopeless, and more images help.
    assert 0.3 < metrics["few_shot1_top1"] < metrics["few_shot3_top1"] < 1

    # Only what was drawn was extracted of the training set, and all of the other.
    assert len(subject.extracted[0]) < 25
    assert len(subject.extracted[1]) == 60

    # A model that has a representation layer is measured after it. Nothing is extracted yet.
    subject = array_subject(train, val)
    subject.model.known_outputs = ("representation",)
    assert two_draws.metrics(subject) == metrics


# ---- linear heads -------------------------------------------------------------------------------

RATES = (1e-6, 1.0)


def clusters(*, name, width=5):
    """Three classes that a line separates."""
    labels = [number % 3 for number in range(90)]
    # The two splits have different noise: their names have different lengths.
    random = torch.Generator().manual_seed(len(name))
    values = torch.randn(90, width, generator=random)
    values[torch.arange(90), torch.tensor(labels)] += 8.0
    return split_of(values, labels)


def probe(**settings):
    chosen = {
        "learning_rates": RATES,
        "steps": 60,
        "batch": 32,
        **settings,
    }
    return LinearHeads(LinearHeadsSettings(**chosen))


def test_the_best_head_separates_clusters():
    subject = array_subject(clusters(name="train"), clusters(name="test"))
    metrics = probe().metrics(subject)
    names = "linear_top1 linear_dev_top1 linear_lr linear_lr_at_end"
    at_end = dict.fromkeys(names.split(), 1.0)
    assert metrics == at_end

    # The best rate is no longer the largest one of those tried.
    inside = probe(learning_rates=(1e-6, 1.0, 1e-7, 1e6)).metrics(subject)
    assert inside == at_end | {"linear_lr_at_end": 0.0}


def test_the_reported_split_does_not_choose():
    """Its labels are shifted: the rate that learns nothing would look better on it."""
    train = clusters(name="train")
    test = clusters(name="test")
    test.label = (test.label + 1) % 3
    metrics = probe().metrics(array_subject(train, test))
    assert metrics["linear_top1"] == 0.0
    assert metrics["linear_dev_top1"] == 1.0
    assert metrics["linear_lr"] == 1.0

    # The part that chooses is not trained on.
    fit, dev = dev_split(50, 0.1, seed=0)
    assert len(dev) == 5
    assert sorted([*fit, *dev]) == list(range(50))

    # It is drawn: the last images of a sorted training set would be of one class.
    _, other_dev = dev_split(50, 0.1, seed=1)
    assert not np.array_equal(dev, other_dev)

    # Each part has an image, even of two and with a share that rounds to none.
    fit, dev = dev_split(2, 0.01, seed=0)
    assert len(fit) == 1
    assert len(dev) == 1


def test_heads_on_blocks_see_four_choices_of_columns():
    # Columns: the class tokens of four blocks, the last first, then the mean patch token.
    choices = column_choices(10, "blocks")
    expected = [
        [0, 1],
        [*range(8)],
        [0, 1, 8, 9],
        [*range(10)],
    ]
    assert [columns.tolist() for columns in choices] == expected

    train = clusters(name="train", width=10)
    test = clusters(name="test", width=10)
    subject = array_subject(train, test)
    on_blocks = probe(inputs="blocks")
    assert on_blocks.metrics(subject)["linear_top1"] > 0.9

    # A model without a class token has no such output: said before hours of extraction.
    subject.model.known_outputs = ("logits", "features")
    with refused("class token"):
        on_blocks.check(subject)


THREE_RATES = (0.01, 0.5, 3.0)
STEPS = 12
BATCH = 16
# The other four rows are for choosing the head, and must not be trained on.
CHOSEN = np.arange(2, 38)


def test_heads_equal_torch_sgd():
    values = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(40) % 3
    # A rank may hold its rows in any order.
    order = np.random.default_rng(0).permutation(40)
    rows = Features(
        samples=order,
        values_ND=values[order],
        labels_N=labels[order],
    )
    options = {
        "chosen": CHOSEN,
        "num_classes": 3,
        "world": WORLD,
    }
    settings = LinearHeadsSettings(
        learning_rates=THREE_RATES,
        steps=STEPS,
        batch=BATCH,
        seed=1,
    )

    # Without a step the heads are the first weights, from which the slow version starts, too.
    without_steps = settings.model_copy(update={"steps": 0})
    first = train_heads(rows, without_steps, **options)
    trained = train_heads(rows, settings, **options)

    for number, rate in enumerate(THREE_RATES):
        layer = torch.nn.Linear(6, 3)
        with torch.no_grad():
            layer.weight.copy_(first[number, :, :-1])
            layer.bias.zero_()

        # Rates are for a batch of 256 images, as DINOv2 gives them.
        lr = rate * BATCH / 256
        sgd = torch.optim.SGD(layer.parameters(), lr=lr, momentum=0.9)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=STEPS)
        batches = epoch_batches(len(CHOSEN), batch=BATCH, seed=1)
        for rows_B in itertools.islice(batches, STEPS):
            chosen = CHOSEN[rows_B]
            loss = torch.nn.functional.cross_entropy(
                layer(values[chosen]), labels[chosen]
            )
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            cosine.step()

        bias = layer.bias[:, None]
        alone = torch.cat([layer.weight, bias], dim=1)
        assert torch.allclose(trained[number], alone, atol=1e-5)


def test_every_epoch_takes_each_row_once_in_a_new_order():
    batches = itertools.islice(epoch_batches(38, batch=19, seed=0), 200)
    epochs = np.concatenate(list(batches)).reshape(100, 38).tolist()
    assert all(sorted(epoch) == list(range(38)) for epoch in epochs)

    # 38! orders: two equal ones would come of a seed that forgets the epoch.
    assert len(set(map(tuple, epochs))) == 100
