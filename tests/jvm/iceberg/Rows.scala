package ags.judge

import java.nio.ByteBuffer
import java.time.{Instant, LocalDate, LocalDateTime, LocalTime, OffsetDateTime, ZoneOffset}
import java.time.temporal.ChronoUnit
import java.util.{Base64, UUID}
import java.util.concurrent.atomic.AtomicInteger
import java.util.function.Supplier

import scala.jdk.CollectionConverters._
import scala.util.Using

import com.fasterxml.jackson.databind.JsonNode
import com.fasterxml.jackson.databind.node.{JsonNodeFactory, ObjectNode}
import org.apache.iceberg.{DeleteFile, FileFormat, FileMetadata, PartitionKey, Table}
import org.apache.iceberg.data.{
  BaseDeleteLoader,
  GenericFileWriterFactory,
  GenericRecord,
  IcebergGenerics,
  InternalRecordWrapper,
  Record
}
import org.apache.iceberg.deletes.BaseDVFileWriter
import org.apache.iceberg.encryption.NativeEncryptionKeyMetadata
import org.apache.iceberg.io.{OutputFile, OutputFileFactory}
import org.apache.iceberg.types.{Type, Types}
import org.apache.spark.sql.Row
import org.apache.spark.unsafe.types.VariantVal

/** Values of Spark and of Iceberg's records as JSON: {"kind": text} where JSON has no such type. iceberg_java.py reads it.
  */
private object Values {
  private val nodes = JsonNodeFactory.instance
  private val epoch = OffsetDateTime.ofInstant(Instant.EPOCH, ZoneOffset.UTC)

  def write(value: Any): JsonNode = value match {
    case null                   => nodes.nullNode
    case flag: Boolean          => nodes.booleanNode(flag)
    case number: Byte           => nodes.numberNode(number.toLong)
    case number: Short          => nodes.numberNode(number.toLong)
    case number: Int            => nodes.numberNode(number.toLong)
    case number: Long           => nodes.numberNode(number)
    case number: Float          => tagged("float", number.toDouble.toString)
    case number: Double         => tagged("float", number.toString)
    case text: CharSequence     => nodes.textNode(text.toString)
    case bytes: Array[Byte]     => tagged("bytes", Base64.getEncoder.encodeToString(bytes))
    case bytes: ByteBuffer      => write(array(bytes))
    case date: LocalDate        => tagged("date", date.toString)
    case time: LocalTime        => tagged("time", ChronoUnit.MICROS.between(LocalTime.MIDNIGHT, time).toString)
    case at: Instant            => write(at.atOffset(ZoneOffset.UTC))
    case at: OffsetDateTime     => tagged("timestamptz", ChronoUnit.NANOS.between(epoch, at).toString)
    case at: LocalDateTime      => tagged("timestamp", ChronoUnit.NANOS.between(epoch.toLocalDateTime, at).toString)
    case id: UUID               => tagged("uuid", id.toString)
    case number: java.math.BigDecimal => tagged("decimal", number.toPlainString)
    case variant: VariantVal    => tagged("variant", variant.toString)
    case row: Row               => struct(row.schema.fieldNames.toSeq.zip(row.toSeq))
    case record: Record =>
      struct(record.struct.fields.asScala.toSeq.map(field => field.name -> record.getField(field.name)))
    case map: java.util.Map[_, _] => entries(map.asScala.toSeq)
    case map: scala.collection.Map[_, _] => entries(map.toSeq)
    case list: java.lang.Iterable[_] => write(list.asScala.toSeq)
    case list: Iterable[_] =>
      val all = nodes.arrayNode
      list.foreach(one => all.add(write(one)))
      all
    case other => tagged(other.getClass.getName, other.toString)
  }

  private def tagged(kind: String, text: String): ObjectNode = nodes.objectNode.put(kind, text)

  private def struct(fields: Seq[(String, Any)]): ObjectNode = {
    val all = nodes.objectNode
    fields.foreach { case (name, value) => all.set[JsonNode](name, write(value)) }
    nodes.objectNode.set("struct", all)
  }

  private def entries(all: Seq[(Any, Any)]): ObjectNode =
    nodes.objectNode.set("map", write(all.map { case (key, value) => Seq(key, value) }))

  private def array(bytes: ByteBuffer): Array[Byte] = {
    val copy = new Array[Byte](bytes.remaining)
    bytes.duplicate.get(copy)
    copy
  }

  /** What `write` made, as Iceberg's records have values of a type. */
  def read(value: JsonNode, as: Type): Any = if (value.isNull) null else as match {
    case struct: Types.StructType => record(value.required("struct"), struct)
    case list: Types.ListType     => value.asScala.map(read(_, list.elementType)).toSeq.asJava
    case map: Types.MapType =>
      val all = new java.util.LinkedHashMap[Any, Any]
      value.required("map").forEach(one => all.put(read(one.get(0), map.keyType), read(one.get(1), map.valueType)))
      all
    case _: Types.TimestampType     => at(value, as.asInstanceOf[Types.TimestampType].shouldAdjustToUTC)
    case _: Types.TimestampNanoType => at(value, as.asInstanceOf[Types.TimestampNanoType].shouldAdjustToUTC)
    case _: Types.FixedType         => Base64.getDecoder.decode(value.required("bytes").textValue)
    case _: Types.DecimalType       => new java.math.BigDecimal(value.required("decimal").textValue)
    case _ =>
      as.typeId match {
        case Type.TypeID.BOOLEAN => value.booleanValue
        case Type.TypeID.INTEGER => value.intValue
        case Type.TypeID.LONG    => value.longValue
        case Type.TypeID.FLOAT   => value.required("float").textValue.toDouble.toFloat
        case Type.TypeID.DOUBLE  => value.required("float").textValue.toDouble
        case Type.TypeID.STRING  => value.textValue
        case Type.TypeID.BINARY  => ByteBuffer.wrap(Base64.getDecoder.decode(value.required("bytes").textValue))
        case Type.TypeID.DATE    => LocalDate.parse(value.required("date").textValue)
        case Type.TypeID.TIME    => LocalTime.MIDNIGHT.plus(value.required("time").textValue.toLong, ChronoUnit.MICROS)
        case Type.TypeID.UUID    => UUID.fromString(value.required("uuid").textValue)
        case other               => throw new IllegalArgumentException(s"no values of type $other are written here")
      }
  }

  def record(fields: JsonNode, as: Types.StructType): GenericRecord = {
    val made = GenericRecord.create(as)
    as.fields.forEach(one => made.setField(one.name, read(fields.path(one.name) match {
      case missing if missing.isMissingNode => JsonNodeFactory.instance.nullNode
      case value                            => value
    }, one.`type`)))
    made
  }

  private def at(value: JsonNode, zone: Boolean): Any = {
    val nanos = value.required(if (zone) "timestamptz" else "timestamp").textValue.toLong
    if (zone) epoch.plusNanos(nanos) else epoch.toLocalDateTime.plusNanos(nanos)
  }
}

/** Rows as Iceberg's own reader gives them, which knows the types that Spark does not have. */
private object Reader {
  def rows(table: Table, request: JsonNode): Seq[Record] = {
    val scan = IcebergGenerics.read(table)
    Option(request.get("snapshot")).foreach(id => scan.useSnapshot(id.longValue))
    Using.resource(scan.build())(_.iterator.asScala.map(_.copy()).toList) // the iterator's record is the same each time
  }
}

/** Threads that commit through one table, {"threads": how many}: each an empty snapshot, as often as it is let. */
private object Racers {
  def commit(table: Table, request: JsonNode): Int = {
    val made = new AtomicInteger
    val threads = (1 to request.required("threads").intValue).map { _ =>
      new Thread(() =>
        for (_ <- 1 to 3) {
          try { table.newFastAppend().commit(); made.incrementAndGet() }
          catch { case _: RuntimeException => } // others came first, too often
        }
      )
    }
    threads.foreach(_.start())
    threads.foreach(_.join())
    made.get
  }
}

/** Deletion vectors, {"places": {path of a data file: [positions]}}, whose entries have their keys. */
private object Deleter {
  def delete(table: Table, request: JsonNode): Unit = {
    val tasks = Using.resource(table.newScan().planFiles())(_.asScala.map(one => one.file.location -> one).toMap)
    val files = OutputFileFactory.builderFor(table, 1, System.nanoTime % 1000000).format(FileFormat.PUFFIN).build()
    val output = files.newOutputFile()
    val supplier: Supplier[OutputFile] = () => output.encryptingOutputFile
    val loader = new BaseDeleteLoader((file: DeleteFile) => table.io.newInputFile(file))
    val writer = new BaseDVFileWriter(
      supplier,
      path => tasks(path).deletes match {
        case none if none.isEmpty => null
        case before               => loader.loadPositionDeletes(before, path)
      }
    )
    Using.resource(writer) { open =>
      request.required("places").properties.forEach { one =>
        val file = tasks(one.getKey).file
        one.getValue.forEach(at => open.delete(one.getKey, at.longValue, tasks(one.getKey).spec, file.partition))
      }
    }
    val change = table.newRowDelta().validateFromSnapshot(table.currentSnapshot.snapshotId)
    writer.result.deleteFiles.forEach { file =>
      val key = output.keyMetadata match {
        case own: NativeEncryptionKeyMetadata => own.copyWithLength(file.fileSizeInBytes)
        case other                            => other
      }
      val spec = table.specs.get(file.specId)
      val builder = FileMetadata.deleteFileBuilder(spec).copy(file).withEncryptionKeyMetadata(key)
      change.addDeletes(builder.build())
    }
    writer.result.rewrittenDeleteFiles.forEach(one => change.removeDeletes(one))
    change.commit()
  }
}

/** Writes files of records: {"rows": [{"struct": ..}], "format": "avro|parquet", "columns": [of an equality delete]}. */
private class Writer(table: Table, request: JsonNode) {
  private val format = FileFormat.fromString(request.path("format").asText("parquet"))
  private val files = OutputFileFactory.builderFor(table, 1, System.nanoTime % 1000000).format(format).build()
  private def factories = new GenericFileWriterFactory.Builder(table).dataFileFormat(format).deleteFileFormat(format)
  private val rows = request.required("rows").asScala.toSeq.map(_.required("struct"))

  def append(): Unit = {
    val made = rows.map(Values.record(_, table.schema.asStruct))
    val change = table.newAppend()
    val factory = factories.build()
    val wrapped = new InternalRecordWrapper(table.schema.asStruct)
    val partitions = made.groupBy { row =>
      val key = new PartitionKey(table.spec, table.schema)
      key.partition(wrapped.wrap(row))
      key
    }
    for ((key, rows) <- partitions) {
      val partition = if (table.spec.isUnpartitioned) null else key
      val file = if (partition == null) files.newOutputFile() else files.newOutputFile(partition)
      val writer = factory.newDataWriter(file, table.spec, partition)
      Using.resource(writer)(open => rows.foreach(open.write))
      change.appendFile(writer.toDataFile)
    }
    change.commit()
  }

  /** An equality delete of the whole table, which must not be partitioned. */
  def deleteEqual(): Unit = {
    val schema = table.schema.select(request.required("columns").asScala.map(_.textValue).toSeq.asJava)
    val ids = schema.columns.asScala.map(_.fieldId).toArray
    val factory = factories.equalityFieldIds(ids).equalityDeleteRowSchema(schema).build()
    val writer = factory.newEqualityDeleteWriter(files.newOutputFile(), table.spec, null)
    Using.resource(writer)(open => rows.foreach(row => open.write(Values.record(row, schema.asStruct))))
    table.newRowDelta().addDeletes(writer.toDeleteFile).commit()
  }
}
