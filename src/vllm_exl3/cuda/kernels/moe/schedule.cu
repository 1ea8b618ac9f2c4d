// The order in which row blocks' projections are multiplied where a layer mixes kinds: kind by kind, those of most bits first. The
// thread blocks of a multiprocessor then run the same loop at one time, which its instruction caches hold, and the last work tiles
// are the short ones. Which of one kind comes first is left to chance: no result depends on it.
#include "base/launch.cuh"
#include "moe/arguments.cuh"

constexpr u32 SCHEDULE_THREADS = 1024, SCHEDULE_KINDS = 128;

// One thread block a stage.
extern "C" __global__ void __launch_bounds__(SCHEDULE_THREADS) exl3_moe_schedule(const __grid_constant__ MoeArgs args) {
    __shared__ u32 offsets[SCHEDULE_KINDS];
    wait_on_dependent_grids();
    launch_dependent_grids();
    const MoeStage& stage = args.stages[blockIdx.x];
    const u32 pairs = args.list_sizes[0] * stage.projections;
    const auto projection = [&](u32 pair) -> const Projection& {
        return projection_of(args, args.blocks[pair / stage.projections].expert, stage.first + pair % stage.projections);
    };
    const auto kind = [&](u32 pair) { return SCHEDULE_KINDS - 1 - static_cast<u32>(4 * projection(pair).half_bits + projection(pair).codebook); };
    if (threadIdx.x < SCHEDULE_KINDS) offsets[threadIdx.x] = 0;
    __syncthreads();
    for (u32 pair = threadIdx.x; pair < pairs; pair += SCHEDULE_THREADS) atomicAdd(&offsets[kind(pair)], 1u);
    __syncthreads();
    u32 before = 0;
    if (threadIdx.x < SCHEDULE_KINDS)
        for (u32 i = 0; i < threadIdx.x; ++i) before += offsets[i];
    __syncthreads();
    if (threadIdx.x < SCHEDULE_KINDS) offsets[threadIdx.x] = before;
    __syncthreads();
    for (u32 pair = threadIdx.x; pair < pairs; pair += SCHEDULE_THREADS) {
        RowBlock rows = args.blocks[pair / stage.projections];
        rows.kind = pair % stage.projections | static_cast<u32>(projection(pair).half_bits << 8 | projection(pair).codebook << 16);
        stage.schedule[atomicAdd(&offsets[kind(pair)], 1u)] = rows;
    }
}
