"""Properties of every objective: gradients are independent of micro-batches, texts of a row are isolated, no target
leaks into earlier predictions; and the objectives of each topology."""

import json
import random
from dataclasses import replace

import pytest
import torch

from kvad.config.layers import ClassificationHeadConfig, LanguageHeadConfig
from kvad.errors import ConfigError, UsageError
from kvad.model.no_cache import NoCache
from kvad.train.config.optim import OptimConfig
from kvad.train.config.presets import MODEL_PRESETS
from kvad.train.config.run import RunConfig, TrainConfig
from kvad.train.loop import dry_run
from kvad.train.loop.dry_run import plan_training
from kvad.train.loop.trainer import Trainer, TrainerState
from kvad.train.monitoring.callbacks import Callback
from kvad.train.objectives.cross_entropy import Autocast
from kvad.train.optim.optimizer import OptimizersContainer
from kvad.train.setup.corpora import resolve_corpus
from kvad.train.setup.objective_factory import OBJECTIVE_TOPOLOGY, build_objective, resolve_objective, with_head
from kvad.train.setup.run_data import RunData
from kvad.train.sources.pairs import PairPaths
from tests.support.random_models import build
from tests.support.training_runs import PRESETS, tiny_config, tiny_shape

EXACT = Autocast("fp32", "cpu")
KINDS = [kind for kind in OBJECTIVE_TOPOLOGY if kind != "summarizer"]
WORDS = ["ada", "bob", "cleo", "dan", "eve", "finn", "gus", "hana", "ivo", "jo", "kim", "lea"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Corpora of each objective: short texts, several per row."""
    folder, draw = tmp_path_factory.mktemp("objectives"), random.Random(0)

    def words(low, high):
        return [draw.choice(WORDS) for _ in range(draw.randint(low, high))]

    texts = [words(2, 7) for _ in range(60)]
    (folder / "next-token").write_text("".join(" ".join(text) + "\n" for text in texts))
    (folder / "seq2seq").write_text("".join(f"{' '.join(t)}\t{' '.join(reversed(t))}\n" for t in texts))
    (folder / "tag").write_text("\n".join("".join(f"{w}\t{w[0].upper()}\n" for w in t) for t in [WORDS, *texts]))
    (folder / "classify").write_text("".join(f"{len(t) % 2}\t{' '.join(t)}\n" for t in texts))
    roles = ("user", "assistant")
    talks = [
        [{"role": r, "content": " ".join(words(1, 3))} for _ in range(draw.randint(1, 2)) for r in roles] for _ in texts
    ]
    (folder / "chat").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    for kind in ("masked-lm", "span-corruption"):
        (folder / kind).write_text((folder / "next-token").read_text())
    return folder


def configured(kind, *, context=None, batch=4, accumulate=1, **objective):
    topology = OBJECTIVE_TOPOLOGY[kind]
    preset = "t5-tiny" if kind == "span-corruption" else PRESETS[topology]
    lines = {"document_unit": "lines"} if kind in ("next-token", "masked-lm", "span-corruption") else {}
    seq_len = context or (96 if kind in ("chat", "tag") else 48)
    config = tiny_config(
        model={"preset": preset, "set": tiny_shape(topology)},
        data={"seq_len": seq_len, "validation_fraction": 0.2, **lines},
        tables={"objective": {"kind": kind, **objective}},
        batch_size=batch,
        gradient_accumulation_steps=accumulate,
        steps=10,
    )
    return resolve_objective(config, topology)


def dataset_of(kind, files, tmp_path, **options):
    """Data, model in float64, and objective."""
    config = configured(kind, **options)
    run_data = RunData(config, resolve_corpus(kind, [files / kind]), lambda text: None)
    tokenizer = run_data.make_tokenizer()
    run_data.open(tmp_path / "data", tokenizer)
    model = build(with_head(config.resolve(tokenizer.vocab_size), kind, run_data.labels), dtype=torch.float64)
    return run_data.data, model, build_objective(config, model, EXACT)


def gradient(data, model, objective, step=3):
    batches = data.micro_batches(step)
    total = sum(len(batch.targets) for batch in batches)
    model.zero_grad()
    summed = sum(objective.accumulate_gradients(batch, total) for batch in batches)
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return summed, torch.cat([g.flatten() for g in grads]), [len(batch.targets) for batch in batches]


VARIANTS = [
    *((kind, {}) for kind in KINDS),
    ("seq2seq", {"scheduled_sampling": 0.5}),
    ("tag", {"label_smoothing": 0.1, "input_mask_ratio": 0.2}),
]


@pytest.mark.parametrize(("kind", "options"), VARIANTS, ids=lambda value: str(value))
def test_gradient_is_independent_of_micro_batches(kind, options, files, tmp_path):
    whole = gradient(*dataset_of(kind, files, tmp_path, batch=4, **options))
    summed, got, sizes = gradient(*dataset_of(kind, files, tmp_path, batch=1, accumulate=4, **options))
    assert sum(sizes) == whole[2][0], "the same targets"
    assert summed == pytest.approx(whole[0], rel=1e-12)
    assert (got - whole[1]).abs().max() <= 1e-12 * whole[1].abs().max()
    assert len(set(sizes)) > 1 or kind in ("next-token", "masked-lm"), "micro-batches of equal size would test little"


class Unsaved:
    """Stands in for the checkpointer of a Trainer."""

    has_checkpoint = False

    def save(self):
        pass

    wait = close = save

    def finished(self):
        return []


def trained(files, folder, batch, accumulate):
    """Losses, gradient norms and weights of four steps of Trainer.fit in float64.

    The rate of Adam without ``eps``, or a clipped norm, would hide a factor of the gradient.
    """
    data, model, objective = dataset_of("seq2seq", files, folder, batch=batch, accumulate=accumulate)
    train = TrainConfig(steps=4, batch_size=batch, gradient_accumulation_steps=accumulate, precision="fp32")
    config, steps = OptimConfig(eps=1.0, max_grad_norm=1e9, lr=0.5, warmup_steps=0), []

    class Recorder(Callback):
        def on_step(self, report):
            steps.append((report.loss, report.grad_norm))

    optimization = OptimizersContainer(model, config, train)
    Trainer(model, objective, optimization, data, train, TrainerState(), Unsaved(), callbacks=[Recorder()]).fit()
    targets = [[len(batch.targets) for batch in data.micro_batches(step)] for step in range(4)]
    return steps, torch.cat([p.detach().flatten() for p in model.parameters()]), targets


def plain_first_step(files, folder):
    """Return the loss and the gradient's norm of the first step: torch's mean over the logits of all micro-batches."""
    data, model, _ = dataset_of("seq2seq", files, folder, batch=1, accumulate=4)
    steps, targets = zip(*((batch.model_input, batch.targets) for batch in data.micro_batches(0)), strict=True)
    logits = [model.logits(model(step, NoCache(model.config)), step.logit_indices) for step in steps]
    loss = torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat(targets))
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return loss.item(), sum(g.square().sum() for g in gradients if g is not None).sqrt().item()


def test_training_is_independent_of_micro_batches(files, tmp_path):
    """Trainer.fit computes the mean over all targets of a step, although its micro-batches have different numbers."""
    steps, weights, _ = trained(files, tmp_path / "whole", 4, 1)
    split_steps, split_weights, targets = trained(files, tmp_path / "split", 1, 4)
    assert all(len(set(counts)) > 1 for counts in targets)
    assert split_steps[0] == pytest.approx(plain_first_step(files, tmp_path / "plain"), rel=1e-12)
    for one, other in zip(steps, split_steps, strict=True):
        assert other == pytest.approx(one, rel=1e-12)
    assert (split_weights - weights).abs().max() <= 1e-12 * weights.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_dry_run(kind, files, monkeypatch):
    monkeypatch.setattr(dry_run, "TRIAL_SECONDS", 1e3)  # all rows are measured, also on a busy machine
    config = configured(kind)
    found = plan_training(config, [files / kind], None, lambda text: None)
    assert (found.objective, found.kind, found.steps) == (kind, OBJECTIVE_TOPOLOGY[kind], 10) and found.fits is None
    assert found.step_flops > 0 and found.trial.rows == 4 and found.trial.utilization > 0
    if kind in ("next-token", "masked-lm", "span-corruption"):  # epochs count tokens read, not targets
        assert found.epochs * found.train_tokens >= found.steps * 4 * 48
    else:
        assert found.epochs * found.train_tokens == pytest.approx(found.steps * found.tokens_per_step)
    assert found.seconds > found.eval_seconds > 0 and found.memory["activations"] > 0


def changed(step, row, document, vocab):
    """The batch with every token of one document replaced, on both sides."""
    (sub_batch,) = step.sub_batches
    tokens = step.token_ids.clone().view(sub_batch.num_seqs, sub_batch.num_new_tokens)
    in_text = step.document_ids.view(sub_batch.num_seqs, sub_batch.num_new_tokens)[row] == document
    tokens[row, in_text] = (tokens[row, in_text] + 7) % vocab
    source = None if step.encoder_input is None else changed(step.encoder_input, row, document, vocab)
    return step._replace(token_ids=tokens.view(-1), encoder_input=source)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_a_row_are_isolated(kind, files, tmp_path):
    data, model, _ = dataset_of(kind, files, tmp_path)
    batch = data.micro_batches(0)[0]
    (sub_batch,) = batch.model_input.sub_batches
    owner = batch.model_input.document_ids.view(sub_batch.num_seqs, sub_batch.num_new_tokens)
    row = int(owner.amax(1).argmax())
    assert owner[row].max() >= 1, "no row has two texts"
    before = model(batch.model_input, NoCache(model.config))
    after = model(changed(batch.model_input, row, 1, 60), NoCache(model.config))
    moved = (before - after).abs().amax(-1).view(sub_batch.num_seqs, sub_batch.num_new_tokens)
    in_text = torch.zeros_like(owner, dtype=torch.bool)
    in_text[row] = owner[row] == 1
    assert moved[in_text].max() > 1e-3, "the text itself has changed"
    assert moved[~in_text].max() == 0
    source = batch.model_input.encoder_input
    joined = batch.model_input._replace(document_ids=None, encoder_input=source and source._replace(document_ids=None))
    leaked = model(joined, NoCache(model.config))
    if kind != "next-token" or owner[row].max() > 0:
        assert (leaked - before).abs().max() > 1e-6, "without isolation they would"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if OBJECTIVE_TOPOLOGY[kind] != "encoder"])
def test_no_target_leaks_into_earlier_predictions(kind, files, tmp_path):
    """If the token of target t changes, earlier logits stay bit-equal and later ones change."""
    data, model, _ = dataset_of(kind, files, tmp_path)
    batch = data.micro_batches(0)[0]
    (sub_batch,) = batch.model_input.sub_batches
    before = model.logits(model(batch.model_input, NoCache(model.config)), batch.model_input.logit_indices)
    indices, owner = batch.model_input.logit_indices, batch.model_input.document_ids
    for place in indices[torch.linspace(0, len(indices) - 2, 7).long()].tolist():
        read = place + 1  # where the target of ``place`` is read
        if read % sub_batch.num_new_tokens == 0 or owner[read] != owner[place]:
            continue
        number = int((indices == place).nonzero())
        assert batch.model_input.token_ids[read] == batch.targets[number], "shifted right by one"
        tokens = batch.model_input.token_ids.clone()
        tokens[read] = (tokens[read] + 5) % 60
        after = model.logits(model(batch.model_input._replace(token_ids=tokens), NoCache(model.config)), indices)
        moved = (after - before).abs().amax(-1)
        assert moved[: number + 1].max() == 0
        later = (indices >= read) & (indices < read + 1)
        assert not later.any() or moved[later].max() > 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_independent_of_padding(kind, files, tmp_path):
    """Another padding token changes no number."""
    data, _, objective = dataset_of(kind, files, tmp_path)
    batch = next(b for step in range(40) for b in data.micro_batches(step) if (b.model_input.document_ids is not None))

    def repadded(step):
        tokens = torch.where(step.document_ids < 0, (step.token_ids + 9) % 60, step.token_ids)
        return step._replace(token_ids=tokens, encoder_input=step.encoder_input and repadded(step.encoder_input))

    assert (batch.model_input.document_ids.index_select(0, batch.model_input.logit_indices) >= 0).all()
    other = batch._replace(model_input=repadded(batch.model_input))
    assert objective.evaluate_loss([other]) == objective.evaluate_loss([batch])


@pytest.mark.parametrize("kind", ["masked-lm", "span-corruption", "seq2seq", "tag"])
def test_batches_are_a_function_of_the_step(kind, files, tmp_path):
    options = {"scheduled_sampling": 0.5} if kind == "seq2seq" else {}
    first, again = (dataset_of(kind, files, tmp_path, **options)[0] for _ in range(2))
    for step in (5, 0, 5):
        for one, other in zip(first.micro_batches(step), again.micro_batches(step), strict=True):
            assert torch.equal(one.model_input.token_ids, other.model_input.token_ids)
            assert torch.equal(one.targets, other.targets)
            assert one.sampled_indices is None or torch.equal(one.sampled_indices, other.sampled_indices)
    tokens = [first.micro_batches(step)[0].model_input.token_ids for step in (4, 5)]
    assert not torch.equal(*tokens)


def test_accuracy_counts_most_likely_classes(files, tmp_path):
    data, model, objective = dataset_of("tag", files, tmp_path)
    found = objective.evaluate_loss(data.evaluation())
    right = 0
    for batch in data.evaluation():
        with torch.no_grad():
            logits = model.logits(model(batch.model_input, NoCache(model.config)), batch.model_input.logit_indices)
        right += int((logits.argmax(-1) == batch.targets).sum())
    assert (found.num_correct, found.targets) == (right, data.validation_tokens)
    assert found.accuracy == right / data.validation_tokens


# ---------------------------------------------------------------- which fits


@pytest.mark.parametrize("topology", PRESETS)
@pytest.mark.parametrize("kind", OBJECTIVE_TOPOLOGY)
def test_objective_of_another_topology_is_refused(kind, topology):
    config = RunConfig.from_dict({"objective": {"kind": kind}})
    if OBJECTIVE_TOPOLOGY[kind] == topology:
        assert resolve_objective(config, topology).objective.kind == kind
    else:
        message = f"objective.kind: {kind} needs an? {OBJECTIVE_TOPOLOGY[kind]}, and this model"
        with pytest.raises(ConfigError, match=message):
            resolve_objective(config, topology)


def test_default_objective_follows_from_the_model():
    chosen = {topology: resolve_objective(RunConfig(), topology).objective.kind for topology in PRESETS}
    assert chosen == {"decoder": "next-token", "encoder-decoder": "seq2seq", "encoder": "masked-lm"}


@pytest.mark.parametrize(
    ("topology", "table", "message"),
    [
        ("decoder", {"noise_density": 0.3}, "objective.noise_density: objective next-token has no use for it"),
        ("encoder", {"kind": "tag", "mean_span_length": 5}, "objective.mean_span_length: objective tag"),
        ("encoder", {"scheduled_sampling": 0.5}, "objective.scheduled_sampling: objective masked-lm"),
        ("encoder-decoder", {"chat_template": "x"}, "objective.chat_template: objective seq2seq"),
        ("encoder-decoder", {"scheduled_sampling_steps": 7}, "objective.scheduled_sampling: must be above 0"),
        ("encoder-decoder", {"label_smoothing": 1.0}, r"objective.label_smoothing: must be in \[0, 1\)"),
        ("encoder-decoder", {"kind": "spanns"}, "objective.kind: must be one of"),
        ("encoder-decoder", {"smothing": 0.1}, "smoothing"),
    ],
)
def test_keys_are_applied_or_refused(topology, table, message):
    with pytest.raises(ConfigError, match=message):
        resolve_objective(RunConfig.from_dict({"objective": table}), topology)


def test_heads_follow_from_the_data_or_are_checked():
    masked = MODEL_PRESETS["encoder-tiny"](300, 32)
    tagger = with_head(masked, "tag", ("A", "B"))
    assert tagger.head == ClassificationHeadConfig(("A", "B")) and with_head(tagger, "tag", ("B",)) is tagger
    assert with_head(masked, "classify", ("A",)).pools_sequence
    assert isinstance(with_head(masked, "masked-lm", ()).head, LanguageHeadConfig)
    with pytest.raises(ConfigError, match="must contain every label of the data, 'C' is missing"):
        with_head(tagger, "tag", ("A", "C"))
    with pytest.raises(ConfigError, match="must be 'row' for objective classify, got 'token'"):
        with_head(tagger, "classify", ("A",))
    with pytest.raises(ConfigError, match="must be a language head for objective masked-lm, got classification"):
        with_head(tagger, "masked-lm", ())


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("tag", {"isolate_documents": False}, r"data\.isolate_documents: objective tag reads each text by itself"),
        ("span-corruption", {"reset_positions": False}, r"data\.reset_positions: objective span-corruption"),
        ("chat", {"packing": "best-fit"}, r"data\.packing: best-fit is for documents and pairs"),
        ("classify", {"text_field": "body"}, r"data\.text_field: .*objective\.text_field"),
        ("tag", {"format": "jsonl"}, r"data\.format: objective tag has its own format"),
        ("tag", {"order": "windows"}, r"data\.order: windows is for documents"),
        ("masked-lm", {"order": "stream"}, r"data\.order: 'stream' is for next-token"),
    ],
)
def test_document_keys_are_refused_for_examples(kind, data, message, files, tmp_path):
    content = configured(kind).to_dict()
    config = RunConfig.from_dict({**content, "data": {**content["data"], **data}})

    def opened():
        run_data = RunData(config, resolve_corpus(kind, [files / kind]), lambda text: None)
        run_data.open(tmp_path / "data", run_data.make_tokenizer())

    with pytest.raises(ConfigError, match=message):
        opened()


@pytest.mark.parametrize("switch", ["reset_positions", "isolate_documents"])
def test_masked_lm_without_reset_or_isolation(switch, files, tmp_path):
    content = configured("masked-lm", context=200).to_dict()
    packing = {"packing": "first-fit", switch: False}
    config = RunConfig.from_dict({**content, "data": {**content["data"], **packing}})
    run_data = RunData(config, resolve_corpus("masked-lm", [files / "masked-lm"]), lambda text: None)
    tokenizer = run_data.make_tokenizer()
    run_data.open(tmp_path / "data", tokenizer)
    special = set(tokenizer.special_tokens.names().values())
    assert all(not special & set(batch.targets.tolist()) for batch in run_data.data.micro_batches(0))


def test_pairs_are_refused_for_documents(files):
    for kind in ("next-token", "masked-lm", "span-corruption"):
        with pytest.raises(UsageError, match=f"objective {kind} reads documents"):
            resolve_corpus(kind, PairPaths(((files / "seq2seq",),)))


def test_mean_pooled_classification(files, tmp_path):
    """Packed, each text's scores equal those of the text alone."""
    data, model, _ = dataset_of("classify", files, tmp_path)
    first = model.config
    for config in (first, replace(first, head=replace(first.head, pool="mean"))):
        model = build(config, dtype=torch.float64)
        batch = data.micro_batches(0)[0]
        got = build_objective(configured("classify"), model, EXACT).evaluate_loss([batch])
        (sub_batch,) = batch.model_input.sub_batches
        rows = batch.model_input.document_ids.view(sub_batch.num_seqs, sub_batch.num_new_tokens)
        summed, number = 0.0, 0
        for row in range(sub_batch.num_seqs):
            for text in range(int(rows[row].max()) + 1):
                at = (rows[row] == text).nonzero().view(-1) + row * sub_batch.num_new_tokens
                alone = batch.model_input._replace(
                    token_ids=batch.model_input.token_ids[at],
                    positions=batch.model_input.positions[at],
                    document_ids=None,
                    seq_lens=None,
                    sub_batches=(type(sub_batch)(1, len(at), len(at)),),
                )
                scores = model.pooled_outputs(model(alone, NoCache(config)), alone)
                summed += torch.nn.functional.cross_entropy(scores, batch.targets[number : number + 1]).item()
                number += 1
        assert number == len(batch.targets) and got.loss == pytest.approx(summed / number, rel=1e-12)


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_is_independent_of_the_batch_size(kind, files, tmp_path):
    """Single rows and seven at a time give the same targets and loss."""
    data, _, objective = dataset_of(kind, files, tmp_path, batch=1)
    alone = objective.evaluate_loss(data.evaluation())
    data, _, _ = dataset_of(kind, files, tmp_path, batch=7)
    sizes = [batch.model_input.sub_batches[0].num_seqs for batch in data.evaluation()]
    assert len(sizes) == 1 or len(set(sizes)) > 1 or sizes[0] < 7, "no batch is uneven"
    found = objective.evaluate_loss(data.evaluation())
    assert found.targets == alone.targets and found.loss == pytest.approx(alone.loss, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_corpus_shorter_than_a_batch_is_repeated(kind, files, tmp_path):
    """A step with more rows than the corpus continues in later epochs; its loss is still a mean."""
    data, model, objective = dataset_of(kind, files, tmp_path, batch=150)
    (batch,) = data.micro_batches(0)
    assert batch.model_input.sub_batches[0].num_seqs == 150
    share = 0.15 if kind in ("masked-lm", "span-corruption") else 1
    assert len(batch.targets) > share * data.train_tokens, "more than one epoch"
    summed, _, (targets,) = gradient(data, model, objective, step=0)
    assert targets == len(batch.targets)
    assert summed / targets == pytest.approx(objective.evaluate_loss([batch]).loss, rel=1e-12)
