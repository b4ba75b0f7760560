/* Whether the processor's matrix tiles (AMX) can be used. Some virtual machines announce them and hide the leaf of
 * cpuid that says how large they are. oneDNN then sets up tiles of no size, and the first multiplication in bfloat16
 * ends the process. */
#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>

#define FEATURES 7
#define ANNOUNCED (1u << 24) /* of edx: AMX-TILE */
#define SIZES 0x1d

long stepsaver_tiles_are_broken(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(FEATURES, 0, &a, &b, &c, &d) || !(d & ANNOUNCED)) return 0;
    return !__get_cpuid_count(SIZES, 1, &a, &b, &c, &d) || !a;
}
#else
long stepsaver_tiles_are_broken(void) { return 0; }
#endif
