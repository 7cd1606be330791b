// What every source here begins with. An emulation on a CPU brings its own.
typedef unsigned long long count_t;

#define SHARED(type, name) extern __shared__ __align__(16) type name[]

// Return the float32 bits of a float16.
static __device__ __forceinline__ unsigned half_to_float_bits(unsigned short bits)
{
    unsigned wide;
    asm("{ .reg .f32 f; cvt.f32.f16 f, %1; mov.b32 %0, f; }" : "=r"(wide) : "h"(bits));
    return wide;
}

// Add 1 to a counter in shared memory if `counts`. The hardware adds up all lanes with one address
// first (ATOMS.POPC.INC), so many equal numbers do not wait for each other. In assembly, because
// the compiler makes a branch and a new address of each `atomicAdd`.
static __device__ __forceinline__ void add_one(unsigned *table, unsigned at, bool counts)
{
    const unsigned address = (unsigned)__cvta_generic_to_shared(table) + 4 * at;
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %1, 0; @p red.shared.add.u32 [%0], 1; }"
        : : "r"(address), "r"((unsigned)counts) : "memory");
}
