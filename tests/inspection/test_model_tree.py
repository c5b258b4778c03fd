"""kvad inspect --tree: every parameter is in one node, and every format has all of them."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from kvad import config as cfg
from kvad.cache.config import CacheConfig
from kvad.cache.groups import build_groups, group_bytes
from kvad.cli.output import json_line
from kvad.config.layers import AttentionConfig, LanguageHeadConfig, LearnedPositionsConfig, MoEConfig, StackConfig
from kvad.config.model import attention_specs
from kvad.config.parameter_shapes import num_parameters, weight_shapes
from kvad.inspection import model_tree
from kvad.inspection.component_text import ENCODING_SUPPORT, describe_allowed
from kvad.inspection.model_tree import build_model_tree, fold_indices
from kvad.inspection.plot import draw_boxes
from kvad.planning.known_models import KNOWN_MODELS, known_model
from tests.cli.test_main import assert_loads_no_torch
from tests.hf_parity import checkpoint as references
from tests.support.golden_models import GoldenModel
from tests.support.lab_models import CONFIGS, ENCODERS, EVERY, LAYER_NORM, PAIRS, tiny, write_checkpoint

NAMES = [*EVERY, *KNOWN_MODELS]


def config_of(name):
    return EVERY[name] if name in EVERY else known_model(name)


def walk(node):
    yield node
    for child in node.children:
        yield from walk(child)


def parts_of(node, part):
    return [each for each in walk(node) if each.part == part]


# ---------------------------------------------------------------- the tree


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_counted_once(name):
    config = config_of(name)
    root = build_model_tree(config, name)
    assert root.parameters == num_parameters(config) == sum(each.parameters or 0 for each in root.children)
    for each in walk(root):
        if each.children and each.part != "cache":
            assert each.parameters == sum(child.parameters or 0 for child in each.children)
    shapes = sorted(weight_shapes(config).values())
    drawn = [shape for each in parts_of(root, "embedding") + parts_of(root, "head") for shape in each.tensors.values()]
    for stack in parts_of(root, "stack"):
        drawn += [shape for each in stack.children if each.part == "norm" for shape in each.tensors.values()]
        for layers in parts_of(stack, "layers"):
            for each in layers.children:
                for tensor, shape_ in each.tensors.items():
                    shared = "(shared)" in tensor or tensor.startswith("positions.")
                    drawn += [shape_] * (1 if shared else len(layers.facts["layers"]))
    assert sorted(drawn) == shapes


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_is_in_one_node(name):
    config = config_of(name)
    for stack, node in zip(
        [stack for stack in (config.encoder, config.decoder) if stack is not None],
        parts_of(build_model_tree(config, name), "stack"),
        strict=True,
    ):
        layers = parts_of(node, "layers")
        assert sorted(index for each in layers for index in each.facts["layers"]) == list(range(stack.num_layers))
        for each in layers:
            spec = stack.layer_types[each.facts["kind"]]
            assert all(stack.layer_config(index) == spec for index in each.facts["layers"])
            attention = next(child for child in each.children if child.part == "attention")
            assert attention.facts["num_heads"] == spec.attention.num_heads
            assert attention.facts["window"] in (spec.attention.window, None)
            assert ("both ways" in attention.title) == (not spec.attention.causal)
            assert bool(parts_of(each, "cross_attention")) == (spec.cross_attention is not None)


@pytest.mark.parametrize("name", NAMES)
def test_cache_groups_equal_the_memory_plan(name):
    config = config_of(name)
    found = parts_of(build_model_tree(config, name, dtype="bfloat16"), "group")
    source = config.encoder_input.max_seq_len if config.encoder_input else 0
    cache = CacheConfig(max_num_seqs=1, max_seq_len=config.max_seq_len, max_source_len=source, dtype="bfloat16")
    expected = build_groups(attention_specs(config), cache)
    assert len(found) == len(expected)
    for node, group in zip(found, expected, strict=True):
        size = group_bytes(group)
        assert (node.facts["bytes_per_token"], node.facts["bytes_per_row"]) == (size.per_token_payload, size.per_seq)
        assert (
            node.facts["is_cross_attention"] == group.spec.is_cross_attention
            and node.facts["window"] == group.spec.window
        )
        assert node.facts["layers"] == [index % config.decoder.num_layers for index in group.layers]
    if config.kind == "encoder":
        assert "no cache" in [node.title for node in parts_of(build_model_tree(config, name), "cache")]


PARTS = {  # by norm position, in order of computation
    "pre": "norm1 attention norm_cross cross_attention norm2 mlp",
    "post": "attention norm1 cross_attention norm_cross mlp norm2",
    "after": "attention norm1 mlp norm2",
    "normed": "norm1 attention norm2 mlp",
    "parallel": "norm1 attention mlp",
    "parallel_pair": "norm1 attention norm2 mlp",
    "sandwich": "norm1 attention norm1_after norm_cross cross_attention norm_cross_after norm2 mlp norm2_after",
}


@pytest.mark.parametrize("position", PARTS)
def test_norms_are_in_order_of_computation(position):
    names = PARTS[position].split()
    config = PAIRS["pair"] if "cross_attention" in names else CONFIGS["plain"]
    stack = StackConfig(2, config.decoder.layer_types, norm_position=position)
    layers = parts_of(build_model_tree(replace(config, decoder=stack), "m"), "layers")[-1]
    assert [child.part for child in layers.children] == ["norm" if "norm" in name else name for name in names]
    titles = [child.title.partition(":")[0] for child in layers.children if child.part == "norm"]
    is_after = [name.endswith("_after") or position in ("post", "after") for name in names if "norm" in name]
    assert [title.startswith("norm after") for title in titles] == is_after
    assert position != "parallel" or titles == ["norm before attention and the MLP"]


def test_layer_without_its_first_norm():
    layer = replace(CONFIGS["plain"].decoder.layer_types["L"], pre_attention_norm=False)
    kinds = {"F": layer, "L": replace(layer, pre_attention_norm=True)}
    root = build_model_tree(tiny(layers=4, kinds=kinds, pattern="FLLL"), "m")
    first, rest = parts_of(root, "layers")
    assert first.title == "layer 0 (of kind F)" and first.children[0].part == "attention"
    assert rest.title == "layers 1-3 (of kind L)" and rest.children[0].part == "norm"


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([3], "3"),
        ([0, 1, 2, 3], "0-3"),
        ([0, 2, 4], "0, 2, 4"),
        ([0, 1, 3, 4, 6, 7, 9], "0-1, 3-4, 6-7, 9"),
        (range(0, 26, 2), "0, 2, 4 ... 24"),
        (range(5, 30, 6), "5, 11, 17, 23, 29"),
        (range(12), "0-11"),
    ],
)
def test_indices_are_folded(numbers, expected):
    assert fold_indices(numbers) == expected


# ---------------------------------------------------------------- texts


def text_of(config):
    return model_tree.tree_to_text(build_model_tree(config, "m"))


def test_encodings_list_their_support():
    """DESIGN's table of positions; only in decoders, whose keys are cached."""

    def support(config):
        return [node for node in walk(build_model_tree(config, "m")) if node.facts.get("allows")]

    for name in ("learned", "sinusoidal", "plain", "alibi", "t5"):
        kind = "rope" if name == "plain" else name
        (node,) = support(CONFIGS[name])
        assert node.facts["allows"] == ENCODING_SUPPORT[kind]._asdict()
        assert tuple(node.lines[-3:]) == tuple(describe_allowed(kind))
    cross = parts_of(build_model_tree(PAIRS["pair"], "m"), "cross_attention")[0]
    assert cross.facts["allows"] == ENCODING_SUPPORT["source"]._asdict()
    assert not any(support(config) for config in ENCODERS.values())
    without = tiny(AttentionConfig(4, position=None))
    assert [node.facts["allows"] for node in support(without)] == [ENCODING_SUPPORT["none"]._asdict()]
    absolute = replace(without, embedding=replace(without.embedding, position=LearnedPositionsConfig(64)))
    assert text_of(absolute).count("eviction:") == 1


def test_support_table_equals_the_design():
    assert "table ends" in ENCODING_SUPPORT["learned"].eviction and "impossible" in ENCODING_SUPPORT["learned"].endless
    assert "same positions" in ENCODING_SUPPORT["sinusoidal"].reuse
    assert "rotated" in ENCODING_SUPPORT["rope"].eviction and "R(delta)" in ENCODING_SUPPORT["rope"].endless
    assert ENCODING_SUPPORT["alibi"] == ENCODING_SUPPORT["t5"] and "renumber" in ENCODING_SUPPORT["t5"].endless


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (tiny(AttentionConfig(4, 2, window=7)), ["attention, causal, a window of 7", "the last 7 tokens"]),
        (
            tiny(AttentionConfig(4, 2, window=64)),
            ["attention, causal  ", "of all tokens"],
        ),  # the limit: no window at all
        (
            tiny(AttentionConfig(4, 2, logit_softcap=5.0, sink_logits=True)),
            ["softcap 5", "a sink logit per head", "sink_logits 4"],
        ),
        (tiny(AttentionConfig(4, 1)), ["one key-value head for all"]),
        (
            tiny(AttentionConfig(4, 2, head_dim=10, value_dim=3)),
            ["4 heads of 10, values of 3", "2 key-value heads of 10 + 3"],
        ),
        (tiny(AttentionConfig(4, qk_norm="head"), norm=LAYER_NORM), ["q and k normed per head, one weight"]),
        (
            tiny(AttentionConfig(4, head_dim=8, position=cfg.RopeConfig(5e5, 0.5, True))),
            ["theta 500,000, of the first 0.5", "interleaved"],
        ),
        (
            tiny(AttentionConfig(4, head_dim=8, position=cfg.RopeConfig(scaling=cfg.DynamicScalingConfig(2.0, 32)))),
            ["dynamic scaling, factor 2, made for 32", "made for 32, other frequencies"],
        ),
        (
            tiny(AttentionConfig(4, head_dim=8, position=cfg.RopeConfig(scaling=cfg.YarnScalingConfig(4.0, 16)))),
            ["yarn scaling, factor 4, made for 16"],
        ),
        (
            tiny(AttentionConfig(6, 2, position=cfg.AlibiConfig(0.5, round_to_bfloat16=True))),
            ["slopes times 0.5, rounded to bfloat16"],
        ),
        (tiny(mlp=MoEConfig(40, 8, 2, router_bias=True)), ["8 experts of 40", "goes to 2 of them", "with bias"]),
        (
            tiny(mlp=MoEConfig(40, 8, 2, selection_bias=True, num_groups=4, num_groups_per_token=2, routed_scale=2.5)),
            ["router softmax with selection bias, renormalized, times 2.5", "the best 2 of 4 groups of experts"],
        ),
        (
            tiny(mlp=MoEConfig(40, 8, 2, router="sigmoid", renormalize=False, shared_size=56, shared_gate=True)),
            ["of them, router sigmoid", "a shared gated MLP of 56 times a sigmoid"],
        ),
        (tiny(mlp=MoEConfig(40, 8, 2, sparsemixer_jitter=0.01)), ["router sparsemixer within 0.01"]),
        (tiny(mlp=MoEConfig(40, 2, 1, swiglu_alpha=1.7, swiglu_limit=7.0)), ["sigmoid(1.7 gate), cut to 7"]),
        (
            tiny(AttentionConfig(4, softmax_scale=0.25, clip_qkv=8.0, qkv_bias=True)),
            ["scale 0.25", "q, k, v cut to 8", "bias of q, k, v"],
        ),
        (
            tiny(head=LanguageHeadConfig(logit_scale=0.5, logit_softcap=30.0, bias=True), tie_embeddings=False),
            ["times 0.5, softcap 30, bias", "of its own"],
        ),
        (
            CONFIGS["latent"],
            [
                "4 heads of 6 + 4 rotated, values of 5, queries from 14",
                "the cache stores a latent of 12 and a key of 4 for all",
                "kv_down 16x24",
                "1 key-value head of 16, of all tokens",
            ],
        ),
        (CONFIGS["learned"], ["learned positions, a table of 66, offset 2", "eviction: exact until the table ends"]),
        (CONFIGS["t5 per layer"], ["8 buckets up to distance 16, one way, a table per layer"]),
        (PAIRS["pair of widths"], ["encoder, 3 layers of width 30", "of 48 of source", "k 12x30"]),
        (PAIRS["pair post"], ["norm after cross-attention", "sinusoidal positions, interleaved, base 10,000"]),
        (ENCODERS["encoder classes"], ["head: 3 labels per token", "a, b, c"]),
        (ENCODERS["encoder rows"], ["head: 2 labels per row, of its first state", "first a matrix, bias, tanh"]),
        (ENCODERS["encoder pooled"], ["head: a vector per row", "the mean"]),
    ],
)
def test_texts_of_config_fields(config, expected):
    text = text_of(config)
    for words in expected:
        assert words in text, text


# ---------------------------------------------------------------- drawings


@pytest.mark.parametrize("name", NAMES)
def test_text_fits_100_columns_and_is_complete(name):
    root = build_model_tree(config_of(name), name)
    lines = model_tree.tree_to_text(root).splitlines()
    assert max(map(len, lines)) <= 100 and not any(line != line.rstrip() for line in lines)
    plain = " ".join(" ".join(re.sub("[│├└─]", " ", line).split()) for line in lines)
    for node in walk(root):
        for line in node.lines:
            assert " ".join(line.split()) in plain
        for shape_ in node.tensors.values():
            assert "x".join(map(str, shape_)) in plain


@pytest.mark.parametrize("name", ["plain", "pair t5", "gemma-2-9b", "bert-base", "t5-base"])
def test_svg_has_every_text_and_no_overlapping_boxes(name, tmp_path):
    root = build_model_tree(config_of(name), f'{name} <&"$x$>')
    boxes = model_tree.tree_to_boxes(root)
    assert [box.title for box in boxes] == [node.title for node in walk(root)]
    path = tmp_path / "tree.svg"
    assert draw_boxes(boxes, [path]) == [path]
    tree = ElementTree.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    texts = [each.text for each in tree.iter(f"{space}text")]
    for box in boxes:
        assert box.title in texts and all(line in texts for line in box.lines) and (not box.note or box.note in texts)
    *_, wide, high = map(float, tree.get("viewBox").split())
    outlines = [each.get("d") for each in tree.iter(f"{space}path") if "fill: #f6f7f9" in each.get("style", "")]
    assert len(outlines) == len(boxes)
    end = 0.0
    for outline in outlines:
        numbers = [float(number) for number in re.findall(r"[\d.]+", outline)]
        assert min(numbers[::2]) >= 0 and max(numbers[::2]) <= wide and end <= min(numbers[1::2])
        end = max(numbers[1::2])
    assert end <= high
    assert not [each for each in tree.iter() if each.tag.endswith(("image", "script", "foreignObject"))]


@pytest.mark.parametrize("name", ["plain", "pair t5", "gemma-2-9b", "encoder classes"])
def test_mermaid_has_every_node(name):
    root = build_model_tree(config_of(name), 'a "name" #1')
    lines = model_tree.tree_to_mermaid(root).splitlines()
    assert lines[0] == "flowchart LR"
    nodes = [line for line in lines if re.fullmatch(r"  n[\d_]+\[\"[^\"]*\"\]:::\w+", line)]
    edges = [line for line in lines if re.fullmatch(r"  n[\d_]+ --> n[\d_]+", line)]
    classes = [line for line in lines if line.startswith("  classDef ")]
    assert len(nodes) == len(list(walk(root))) == len(edges) + 1
    assert 1 + len(nodes) + len(edges) + len(classes) == len(lines)
    assert "a #quot;name#quot; #35;1" in nodes[0]
    known = {line.split()[1] for line in classes}
    assert {line.rpartition(":::")[2] for line in nodes} <= known


@pytest.mark.parametrize("name", NAMES)
def test_json_is_complete(name):
    root = build_model_tree(config_of(name), name)
    found = json.loads(json_line(root))

    def same(node, data):
        assert (data["title"], data["lines"], data["parameters"]) == (node.title, list(node.lines), node.parameters)
        assert {key: tuple(value) for key, value in data["tensors"].items()} == dict(node.tensors)
        for child, inner in zip(node.children, data["children"], strict=True):
            same(child, inner)

    same(root, found)
    assert found["facts"]["kind"] == config_of(name).kind


# ---------------------------------------------------------------- the command


def test_tree_of_checkpoint_known_model_and_config(tmp_path, inspect):
    folder = write_checkpoint(tmp_path / "run", CONFIGS["pattern"])
    code, out, err = inspect(folder, "--tree")
    assert (code, err) == (0, "") and out.startswith("run, a decoder") and "layers 0-1, 3-4 (of kind L)" in out
    (tmp_path / "m.json").write_text(json.dumps(CONFIGS["pattern"].to_dict()))
    assert inspect(tmp_path / "m.json", "--tree")[1].splitlines()[1:] == out.splitlines()[1:]
    code, out, _ = inspect("T5-small", "--tree")
    assert code == 0 and out.startswith("t5-small, an encoder-decoder") and "60,506,624" in out


def test_parts_of_newer_families_are_described():
    def text(name):
        return model_tree.tree_to_text(build_model_tree(GoldenModel(("5", name)).config, name))

    assert "learned scale of the output" in text("gemma4") and "v is k before its norm" in text("gemma4")
    assert "queries grow by 0.3 ln(1 + floor(position / 16))" in text("ministral3")
    assert "they share 2 sets of parameters" in text("albert")
    assert "disentangled, distances up to 20, 8 buckets each way" in text("deberta-v2")
    assert "distances.weight (shared) 16x36" in text("deberta-v2")


def test_tree_of_every_hf_family(tmp_path):
    """Every family of Hugging Face's that kvad reads, as transformers writes it."""
    from kvad.planning.report import read_target

    seen = set()
    for name in references.names("5"):
        meta, _ = references.load("5", name)
        if meta["config"].get("rotary_value"):
            continue
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(references.text(meta["config"]))
        target = read_target(str(folder))
        root = build_model_tree(target.config, name)
        assert root.parameters == num_parameters(target.config)
        assert max(map(len, model_tree.tree_to_text(root).splitlines())) <= 100
        seen.add(target.origin)
    assert {"llama", "gemma2", "t5", "bert", "marian", "modernbert"} <= seen


def test_formats_and_files(tmp_path, inspect):
    text = inspect("gpt2", "--tree")[1]
    assert inspect("gpt2", "--tree", "--format", "text")[1] == text
    assert inspect("gpt2", "--tree", "--format", "mermaid")[1].startswith("flowchart LR")
    first, second = inspect("gpt2", "--tree", "--json")[1], inspect("gpt2", "--tree", "--format", "json")[1]
    assert json.loads(first) == json.loads(second) and json.loads(first)["parameters"] == 124_439_808
    for name, start in (("a.svg", "<?xml"), ("a.txt", "gpt2"), ("a.mmd", "flowchart"), ("a.json", "{")):
        code, out, err = inspect("gpt2", "--tree", "--out", tmp_path / name)
        assert (code, out, err) == (0, "", f"kvad: {tmp_path / name}: written\n") and (
            tmp_path / name
        ).read_text().startswith(start)


def test_unknown_name_is_refused(inspect):
    code, _, err = inspect("gema-2-2b", "--tree")
    assert code == 2 and "did you mean 'gemma-2-2b'?" in err


def test_tree_imports_no_torch():
    assert_loads_no_torch("inspect", "t5-base", "--tree", "--format", "svg")
