// What libfusednorm.so shows.
#pragma once

#if defined(__GNUC__)
#define FUSEDNORM_API __attribute__((visibility("default")))
#else
#define FUSEDNORM_API
#endif
