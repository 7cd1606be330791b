// Figures of all tiles from the partial results of each, and the pairs that differ most; see
// merging.py. Compile without fused multiply-add. TILE: pairs of a tile.
#define GROUP 8
#define MOST_WAITING 24

// Add up `leaf(tile)` of all tiles, halves onto halves as `_totals` of merging.py does. Every
// thread gets the sum. A thread adds the tiles of its column, `blockDim.x` apart, which is a power
// of two; partial sums wait until their other half is there.
template <class Leaf> __device__ double tree(double *columns, long long tiles, Leaf leaf)
{
    const int threads = blockDim.x;
    double waiting[MOST_WAITING];
    long long groups = 1, base = 0;
    int kept = 0;
    while (groups * GROUP * threads < tiles)
        groups *= 2;
    for (long long i = 0; i < groups; ++i) {
        double x[GROUP];
#pragma unroll
        for (int m = 0; m < GROUP; ++m) {
            const long long tile = threadIdx.x + (base + groups * m) * threads;
            x[m] = tile < tiles ? leaf(tile) : 0.0;
        }
#pragma unroll
        for (int half = GROUP / 2; half > 0; half /= 2)
#pragma unroll
            for (int m = 0; m < half; ++m)
                x[m] += x[m + half];
        double sum = x[0];
        for (long long done = i; done & 1; done >>= 1)
            sum = waiting[--kept] + sum;
        waiting[kept++] = sum;
        // Count up from the highest bit, so that halves that belong together follow each other.
        long long bit = groups / 2;
        for (; base & bit; bit /= 2)
            base ^= bit;
        base |= bit;
    }
    __syncthreads();
    columns[threadIdx.x] = waiting[0];
    for (int half = threads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            columns[threadIdx.x] += columns[threadIdx.x + half];
    }
    __syncthreads();
    return columns[0];
}

// A size with its place. Of equal sizes the first place is the larger one.
struct Sized { double size; long long place; };

__device__ __forceinline__ bool is_larger(const Sized &a, const Sized &b)
{
    return a.size > b.size || (a.size == b.size && a.place < b.place);
}

// Return the largest of a block's, to every thread.
__device__ Sized largest_of_block(Sized *sized, const Sized &mine)
{
    __syncthreads();
    sized[threadIdx.x] = mine;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half && is_larger(sized[threadIdx.x + half], sized[threadIdx.x]))
            sized[threadIdx.x] = sized[threadIdx.x + half];
    }
    __syncthreads();
    return sized[0];
}

// Return the largest of n sizes that comes after `last`; its place is n if there is none.
template <class Size> __device__ Sized next_largest(Sized *sized, long long n, const Sized &last, Size size)
{
    Sized mine = {-1.0, n};
#pragma unroll 4
    for (long long i = threadIdx.x; i < n; i += blockDim.x) {
        const Sized each = {size(i), i};
        if (is_larger(last, each) && is_larger(each, mine))
            mine = each;
    }
    return largest_of_block(sized, mine);
}

// A block makes each of the figures, in the order of `FIGURES`; one more finds the `worst` tiles
// with the largest differences, -1 where there are no more.
extern "C" __global__ void __launch_bounds__(1024) merge_tiles(
    const double *sums, const double *extremes, const int *counts, double *figures,
    long long *places, long long n, long long tiles, long long worst)
{
    SHARED(Sized, sized);
    double *columns = (double *)sized;
    const int row = blockIdx.x;
    const auto sum = [=](int of) {
        return tree(columns, tiles, [=](long long tile) { return sums[of * tiles + tile]; });
    };
    const auto count = [=](int of) {
        return tree(columns, tiles, [=](long long tile) { return (double)counts[of * tiles + tile]; });
    };
    const auto mean = [=](int of) {
        const double pairs = count(0);
        return sum(of) / (pairs > 1 ? pairs : 1);
    };
    double figure = 0.0;
    if (row < 6) {
        figure = sum(row < 2 ? row : row + 5);
    } else if (row < 8) {
        figure = mean(row - 6);
    } else if (row < 13) {
        const int of = row - 8;
        const bool of_a = of % 2 == 0, of_r = of % 2 == 1 || of == 4;
        const double mean_a = of_a ? mean(0) : 0.0, mean_r = of_r ? mean(1) : 0.0;
        figure = tree(columns, tiles, [=](long long tile) {
            const double pairs = counts[tile], divisor = pairs > 1 ? pairs : 1;
            double a = 0.0, r = 0.0;
            if (of_a && pairs > 0)
                a = (sums[tile] / divisor - mean_a) + sums[2 * tiles + tile] / divisor;
            if (of_r && pairs > 0)
                r = (sums[tiles + tile] / divisor - mean_r) + sums[3 * tiles + tile] / divisor;
            const double shift = pairs * (of_a ? a : r);
            const double by = of == 3 || of == 4 ? r : a;
            return of < 2 ? shift + 0.0 : shift * by + sums[(2 + of) * tiles + tile];
        });
    } else if (row < 22) {
        figure = count(row - 13);
    } else if (row < 27) {
        const bool least = row == 23 || row == 25;
        const double *of = extremes + (row - 22) * tiles;
        double most = least ? -of[0] : of[0];
        for (long long tile = threadIdx.x; tile < tiles; tile += blockDim.x) {
            const double each = least ? -of[tile] : of[tile];
            most = each > most ? each : most;
        }
        most = largest_of_block(sized, Sized{most, 0}).size;
        figure = least ? -most : most;
    } else if (row == 27) {
        long long first = tiles;
        for (long long tile = tiles - 1 - threadIdx.x; tile >= 0; tile -= blockDim.x) {
            const long long room = n - tile * TILE;
            if (counts[tile] < (room < TILE ? room : TILE))
                first = tile;
        }
        first = largest_of_block(sized, Sized{0.0, first}).place;
        figure = first < tiles ? (double)first : 0.0;
    } else {
        Sized last = {__hiloint2double(0x7FF00000, 0), -1};
        for (int i = 0; i < worst; ++i) {
            last = next_largest(sized, tiles, last, [=](long long tile) { return extremes[tile]; });
            if (threadIdx.x == 0)
                places[i] = last.place < tiles ? last.place : -1;
        }
        return;
    }
    if (threadIdx.x == 0)
        figures[row] = figure;
}

// Return the float32 bits of a number; kinds are 0 bf16, 1 fp16, 2 float32.
__device__ __forceinline__ unsigned bits_of(const void *x, long long at, int kind)
{
    if (kind == 2)
        return ((const unsigned *)x)[at];
    const unsigned short bits = ((const unsigned short *)x)[at];
    return kind == 1 ? half_to_float_bits(bits) : (unsigned)bits << 16;
}

// A block finds the `worst` pairs of its tile: place and both values as float64; zeros where there
// are no more. Pairs that are not finite have no difference.
extern "C" __global__ void __launch_bounds__(1024) worst_pairs(
    const void *actual, const void *reference, const long long *tiles, long long *pairs,
    long long n, long long worst, long long kind_a, long long kind_r)
{
    SHARED(Sized, sized);
    const long long tile = tiles[blockIdx.x], begin = tile * TILE;
    const long long room = tile < 0 ? 0 : n - begin < TILE ? n - begin : TILE;
    pairs += blockIdx.x * 3 * worst;
    Sized last = {__hiloint2double(0x7FF00000, 0), -1};
    for (int i = 0; i < worst; ++i) {
        last = next_largest(sized, room, last, [=](long long at) {
            const unsigned a = bits_of(actual, begin + at, (int)kind_a);
            const unsigned r = bits_of(reference, begin + at, (int)kind_r);
            if ((a & 0x7FFFFFFFu) >= 0x7F800000u || (r & 0x7FFFFFFFu) >= 0x7F800000u)
                return 0.0;
            return fabs((double)__uint_as_float(a) - (double)__uint_as_float(r));
        });
        if (threadIdx.x < 3) {
            const long long at = begin + last.place;
            long long written = 0;
            if (last.place < room && threadIdx.x == 0)
                written = at;
            else if (last.place < room) {
                const bool first = threadIdx.x == 1;
                const unsigned bits = bits_of(first ? actual : reference, at, first ? kind_a : kind_r);
                written = __double_as_longlong((double)__uint_as_float(bits));
            }
            pairs[3 * i + threadIdx.x] = written;
        }
    }
}
