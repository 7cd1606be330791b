// CUDA C on a CPU: a thread is a fiber, and one that waits for others lets them run.
#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define SHARED(type, name) type *name = (type *)shared_memory.data()

typedef unsigned long long count_t;
struct uint4 { unsigned x, y, z, w; };
struct Dimension { unsigned x; };
static Dimension threadIdx, blockIdx, blockDim, gridDim;
static std::vector<uint4> shared_memory;

struct Fiber { ucontext_t context; std::vector<char> stack; bool done; };
struct Barrier { unsigned arrived, turn; };
static ucontext_t scheduler;
static std::vector<Fiber> fibers;
static std::vector<Barrier> warp_barriers;
static std::vector<unsigned long long> exchanged;
static Barrier block_barrier;
typedef void (*Kernel)(
    long long, long long, long long, long long, long long, long long, long long, long long,
    long long, long long, long long);
static Kernel kernel;
static long long *values;

static void wait_at(Barrier &barrier, unsigned size)
{
    const unsigned turn = barrier.turn, me = threadIdx.x;
    if (++barrier.arrived == size) {
        barrier.arrived = 0;
        ++barrier.turn;
    }
    while (barrier.turn == turn) {
        swapcontext(&fibers[me].context, &scheduler);
        threadIdx.x = me;
    }
}

static void __syncthreads() { wait_at(block_barrier, blockDim.x); }
static Barrier &of_warp() { return warp_barriers[threadIdx.x / 32]; }

template <class T> static T __shfl_xor_sync(unsigned, T x, int lane)
{
    memcpy(&exchanged[threadIdx.x], &x, sizeof x);
    wait_at(of_warp(), 32);
    memcpy(&x, &exchanged[threadIdx.x ^ lane], sizeof x);
    wait_at(of_warp(), 32);
    return x;
}

static int __any_sync(unsigned mask, int x)
{
    for (int lane = 1; lane < 32; lane *= 2)
        x |= __shfl_xor_sync(mask, x, lane);
    return x;
}

template <class T> static void atomicAdd(T *at, T x) { *at += x; }
static void add_one(unsigned *table, unsigned at, bool counts)
{
    if (counts)
        ++table[at];
}

template <class To, class From> static To same_bits(From x)
{
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
static float __uint_as_float(unsigned x) { return same_bits<float>(x); }
static int __double2hiint(double x) { return same_bits<long long>(x) >> 32; }
static long long __double_as_longlong(double x) { return same_bits<long long>(x); }
static double __hiloint2double(int high, int low)
{
    return same_bits<double>((long long)high << 32 | (unsigned)low);
}
static unsigned half_to_float_bits(unsigned short bits)
{
    const unsigned sign = (bits & 0x8000u) << 16, size = bits & 0x7FFF;
    if (size >= 0x7C00)
        return sign | 0x7F800000 | (size & 0x3FF) << 13;
    return sign | same_bits<unsigned>(same_bits<float>(size << 13) * 0x1p112f);
}

static void enter()
{
    const unsigned me = threadIdx.x;
    const long long *v = values;
    kernel(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10]);
    fibers[me].done = true;
    swapcontext(&fibers[me].context, &scheduler);
}

// Run a kernel; arguments it does not have do no harm.
extern "C" void emulate(Kernel chosen, int blocks, int threads, int shared, long long *arguments)
{
    kernel = chosen;
    values = arguments;
    gridDim.x = blocks;
    blockDim.x = threads;
    for (int block = 0; block < blocks; ++block) {
        blockIdx.x = block;
        shared_memory.assign((shared + 15) / 16, uint4{0xABABABAB, 0xABABABAB, 7, 7});
        fibers = std::vector<Fiber>(threads);
        warp_barriers.assign((threads + 31) / 32, Barrier{0, 0});
        exchanged.assign(threads, 0);
        block_barrier = Barrier{0, 0};
        for (Fiber &fiber : fibers) {
            fiber.stack.resize(1 << 16);
            fiber.done = false;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, enter, 0);
        }
        for (int left = threads; left > 0;)
            for (int thread = 0; thread < threads; ++thread) {
                if (fibers[thread].done)
                    continue;
                threadIdx.x = thread;
                swapcontext(&scheduler, &fibers[thread].context);
                left -= fibers[thread].done;
            }
    }
}
