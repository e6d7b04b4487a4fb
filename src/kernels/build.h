/* The id that setup.py gives a build, as text: QKV_BUILD is an identifier. */
#ifndef QKV_BUILD_H
#define QKV_BUILD_H

#define QKV_TEXT_OF(x) #x
#define QKV_TEXT(x) QKV_TEXT_OF(x)

static const char qkv_build[] = QKV_TEXT(QKV_BUILD);

#endif
