"""Names shared by operator, CLI and chart: the API group, labels, annotations, condition types and reasons."""

from __future__ import annotations

GROUP = "ddtree.dev"
VERSION = "v1alpha1"
KIND = "DDTreeDeployment"
PLURAL = "ddtreedeployments"
SINGULAR = "ddtreedeployment"
SHORT = "ddt"
API_VERSION = f"{GROUP}/{VERSION}"

# A resource's name becomes a Service's name and the stem of every child's: a DNS label with room for suffixes.
NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
NAME_MAX = 40
NAME_RULE = (
    f"the name must be a DNS label of at most {NAME_MAX} characters that starts with a letter (a-z, 0-9, -), "
    "because Services and Deployments are named after it"
)

FIELD_MANAGER = "ddtree-operator"

# Labels on every child object.
LABEL_DEPLOYMENT = "ddtree.dev/deployment"  # name of the DDTreeDeployment
LABEL_REVISION = "ddtree.dev/revision"  # revision hash (10 hex digits)
LABEL_ROLE = "ddtree.dev/role"  # engine | baseline | builder | record
LABEL_POOL = "ddtree.dev/pool"  # "serving" on pods that a Service may select, "measured" on dedicated baselines
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_RECIPE = "ddtree.dev/recipe"  # first 20 hex digits of the recipe digest

# A person's or an alert's command: JSON of api.actions.ActionRequest; consumed once by id, never removed.
ANNOTATION_ACTION = "ddtree.dev/action"

# On the canary's Service: the HTTPRoute that it was made for, and since when no route names it.
ANNOTATION_ROUTE = "ddtree.dev/route"
ANNOTATION_LEFT_AT = "ddtree.dev/left-at"

ENGINE_CONTAINER = "engine"
ENGINE_PORT = 30000
ENGINE_PORT_NAME = "http"

# Secret <resource>-live-prompts: whoever has its token may read prompts from the engines that serve.
LIVE_SECRET_SUFFIX = "-live-prompts"
LIVE_PREFIX = "live-"  # of the ids that users' prompts have in a record: nothing but a number follows
LIVE_TOKEN_KEY = "token"
LIVE_TOKEN_LENGTH = 16  # characters at least
LIVE_TOKEN_ENV = "SGLANG_DDTREE_LIVE_TOKEN"
LIVE_TOKEN_FOLDER = "/etc/ddtree-live"

GPU_RESOURCE = "nvidia.com/gpu"
GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"
GPU_MEMORY_LABEL = "nvidia.com/gpu.memory"  # MiB, as GPU feature discovery writes it

NODES_SHOWN = 50  # rows of the node table that a status keeps

# Engine flags that the operator sets itself: given twice they would contradict what is measured.
MANAGED_FLAGS = frozenset(
    {
        "--model-path",
        "--model",
        "--revision",
        "--host",
        "--port",
        "--enable-metrics",
        "--tp",
        "--tp-size",
        "--tensor-parallel-size",
        "--speculative-algorithm",
        "--speculative-draft-model-path",
        "--speculative-draft-model",
        "--speculative-draft-model-revision",
        "--speculative-ddtree-budget",
    }
)

# Flags that DDTREE has a field for by now. They are refused in a resource but not in a recorded revision, which must be
# able to serve, and to be gone back to, with the arguments that it was measured with. The chain has no such field.
DDTREE_FLAGS = {"--speculative-dflash-block-size": "spec.engine.speculative.draftBlock"}
