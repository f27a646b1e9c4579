"""The settings of `[method]`, and of each `[[phase]]`, which change some of them on the way."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from lordo.lowrank import BasisMethod
from lordo.optim.error import ErrorDtype
from lordo.optim.options import MomentDtype
from lordo.sync.formats import WireFormat
from lordo.sync.rules import AnchorDevice
from lordo.trainer.settings import Count, Decay, Fraction, NotNegative, Positive, Settings
from lordo.updates import FullrankDenominator, FullrankSignal


class StepSettings(Settings):
    """Options of the local step that may change on the way; None leaves one as it is."""

    lr: Positive | None = None
    """Peak learning rate of the local step."""

    betas: tuple[Decay, Decay] | None = None
    """Decay rates of the first and the second moment, each from 0 up to, not including, 1."""

    eps: NotNegative | None = None
    """Added to the root of the second moment."""

    weight_decay: NotNegative | None = None
    """Decoupled weight decay."""

    omega: Fraction | None = None
    """Share of the low-rank momentum in the step, from 0 to 1; 1 switches the full-rank term off."""

    fullrank_signal: FullrankSignal | None = None
    """What the full-rank term is made of."""

    fullrank_denominator: FullrankDenominator | None = None
    """What the full-rank term is divided by: the mean of Adam's denominator over a whole weight, or per channel."""

    scale: NotNegative | None = None
    """Factor of GaLore's low-rank steps."""

    outer_lr: Positive | None = None
    """Learning rate of the outer optimizer."""

    outer_momentum: Decay | None = None
    """Momentum of the outer optimizer, from 0 up to, not including, 1."""

    @field_validator("betas", mode="before")
    @classmethod
    def _pair(cls, betas: object) -> object:
        if betas is None:
            return None
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            raise ValueError("should be two numbers, such as [0.9, 0.999]")
        return tuple(betas)


class PhaseConfig(StepSettings):
    """From a step on, other options of the method; the schedule of the learning rate goes on."""

    from_step: Annotated[int, Field(ge=2)]
    """First step, counted from 1, with these options; they stay until a later phase changes them."""

    def settings(self) -> dict[str, Any]:
        """Give the options that were set, by name."""
        return self.model_dump(exclude={"from_step"}, exclude_none=True)


class MethodConfig(StepSettings):
    """The training method and its options; an option that is None takes the method's own default."""

    name: str = "lordo"
    """Which row of the table of methods."""

    lr: Positive
    """Peak learning rate of the local step."""

    rank: Count | None = None
    """Rank r of the low-rank optimizer states."""

    sync_every: Count | None = None
    """Optimizer steps between two averagings of the weights, at which the basis is renewed too."""

    sync_exp_avg_every: Count | None = None
    """Optimizer steps between two averagings of the first moments."""

    sync_exp_avg_sq_every: Count | None = None
    """Optimizer steps between two averagings of the second moments."""

    sync_error_every: Count | None = None
    """Optimizer steps between two averagings of what error feedback keeps."""

    sync_wire: WireFormat | None = None
    """How averaged weights travel: "float32", "bfloat16", "int8" or "int4", quantised ones with a scale for each 64 numbers."""

    sync_wire_moments: WireFormat | None = None
    """The same for the moments; follows sync_wire unless given."""

    sync_wire_basis: WireFormat | None = None
    """The same for bases and the first gradient; bfloat16 unless given, or float32 where sync_wire is that."""

    sync_split: bool | None = None
    """Whether what changed inside the basis travels as r×n numbers in full precision, and only the rest in the wire format."""

    sync_overlap: Annotated[int, Field(ge=0)] | None = None
    """Steps of training while an average is on its way; 0 waits for it."""

    sync_fragments: Count | None = None
    """Groups into which the weights are divided; each is averaged every sync_every steps, at steps of its own."""

    error_feedback: bool | None = None
    """Whether each worker keeps what the projection drops and adds it to its next gradient."""

    error_dtype: ErrorDtype | None = None
    """In what the error is held: "float32", or, rounded at random, "bfloat16", "int8" or "int6" (both with a scale for each column)."""

    moment_dtype: MomentDtype | None = None
    """In what both moments are held: "float32", or "bfloat16", rounded at random."""

    anchor_device: AnchorDevice | None = None
    """Where the weights of the last synchronisation are kept: "same" as the weights, or "cpu" (pinned when there is a GPU)."""

    basis: BasisMethod | None = None
    """How a basis is computed: "svd" is exact, "subspace" cheap, "auto" chooses by the size of the weight."""

    basis_every: Count | None = None
    """Steps between two bases of GaLore."""

    basis_interpolation: Fraction | None = None
    """LDAdam's ρ: share of the momentum, against the gradient, in what the basis is taken from."""

    outer: Literal["none", "nesterov"] | None = None
    """Outer optimizer applied to the averaged change of the weights."""

    def settings(self) -> dict[str, Any]:
        """Give the options that were set, by name; without `name` and `lr`."""
        return self.model_dump(exclude={"name", "lr"}, exclude_none=True)
